"""The `kvsteward` command: what can't be done is said in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvsteward_cli.errors import CommandFailed
from kvsteward_cli.local import Local, LocalOptions, read_policy, without_effect, write_keys
from kvsteward_cli.main import main, need
from kvsteward_contract.identity import admin_token
from kvsteward_contract.policy import IdentitySource, decode_policy
from kvsteward_engine.main import make_parser
from kvsteward_sidecar.settings import parse
from kvsteward_sidecar.tenants import read_keys
from support.local_run import local_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.yaml"
KEY = "k" * 32


def test_the_example_is_accepted_and_safe_to_start_with() -> None:
    policy = read_policy(EXAMPLE)
    assert policy.spec.rollout.stage.value == "Shadow"
    assert policy.spec.rollout.kill_switch.value == "Released"


def test_the_admin_token_is_the_one_that_the_operator_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    assert main(["admin-token", "--operator-key-file", str(tmp_path / "key"), "--uid", "u-1"]) == 0
    assert capsys.readouterr().out.strip() == admin_token(bytes(range(32)), "u-1")


@pytest.mark.parametrize(("content", "said"), [(None, "can't be read"), (b"short", "5 bytes")])
def test_an_operator_key_that_cannot_be_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    assert main(["admin-token", "--operator-key-file", str(tmp_path / "key"), "--uid", "u"]) == 2
    assert said in capsys.readouterr().err


def edited(**fields: Any) -> str:
    policy = local_policy("tiny", "8Mi", 2048)
    for path, value in fields.items():
        part, _, field = path.partition("__")
        policy["spec"][part][field] = value
    return yaml.safe_dump(policy)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "No such file", id="no-file"),
        pytest.param("a: [", "is no YAML", id="no-yaml"),
        pytest.param("just words", "expected a KVCachePolicy", id="no-resource"),
        pytest.param(edited(rollout__stage="Half"), "stage", id="unknown-stage"),
        pytest.param(edited(cache__surprise=1), "surprise", id="unknown-field"),
        pytest.param(edited(cache__capacity="1Ki"), "below 1Mi", id="no-room"),
    ],
)
def test_a_policy_that_cannot_be_started_with_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    file = tmp_path / "policy.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["local", "-f", str(file), "--model", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.startswith("kvsteward: ")
    assert printed.count("\n") == 1


def test_a_model_that_is_not_there_is_refused_with_the_way_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["local", "-f", str(EXAMPLE), "--model", str(tmp_path / "none")]) == 2
    assert "kvsteward model fetch smollm2" in capsys.readouterr().err


def test_keys_are_written_as_the_sidecar_reads_them(tmp_path: Path) -> None:
    keys = (f"acme={KEY}1", f"acme={KEY}2", f"globex={KEY}3")
    assert write_keys(tmp_path / "tenants", keys, IdentitySource.API_KEY) == ""
    assert sorted(read_keys(tmp_path / "tenants").values()) == ["acme", "acme", "globex"]


def test_without_a_key_one_is_made_up(tmp_path: Path) -> None:
    made = write_keys(tmp_path / "tenants", (), IdentitySource.API_KEY)
    assert len(made) >= 32
    assert list(read_keys(tmp_path / "tenants").values()) == ["local"]


def test_a_policy_of_gateway_headers_needs_no_key(tmp_path: Path) -> None:
    assert write_keys(tmp_path / "tenants", (), IdentitySource.HEADER) == ""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        pytest.param(("acme",), "TENANT=KEY", id="no-key"),
        pytest.param((f"={KEY}",), "TENANT=KEY", id="no-tenant"),
        pytest.param((f"../acme={KEY}",), "TENANT=KEY", id="a-path"),
        pytest.param((f"..={KEY}",), "TENANT=KEY", id="the-parent"),
        pytest.param(("acme=short",), "32 to 256", id="short-key"),
        pytest.param((f"Acme!={KEY}",), "no tenant name", id="bad-name"),
        pytest.param((f"acme={KEY}", f"globex={KEY}"), "same API key", id="shared-key"),
        pytest.param((f"a={KEY}1", f"a={KEY}2", f"a={KEY}3"), "more than 2", id="three-keys"),
    ],
)
def test_keys_that_cannot_be_used_are_refused_without_showing_them(
    tmp_path: Path, keys: tuple[str, ...], said: str
) -> None:
    with pytest.raises(CommandFailed, match=said) as failed:
        write_keys(tmp_path / "tenants", keys, IdentitySource.API_KEY)
    assert KEY not in str(failed.value)
    assert str(tmp_path) not in str(failed.value)


def test_fields_that_only_pods_have_are_named() -> None:
    policy = local_policy("tiny", "8Mi", 2048)
    policy["spec"]["engine"] |= {"replicas": 3, "template": {"labels": {"team": "a"}}}
    assert without_effect(decode_policy(policy).spec.engine) == ["spec.engine.replicas", "spec.engine.template"]


def test_a_missing_extra_is_named_with_the_way_to_install_it() -> None:
    with pytest.raises(CommandFailed, match=r"pip install 'kvsteward\[sidecar,engine\]'"):
        need("local", "a_module_that_is_not_there")


def test_the_command_starts_without_the_engines_libraries() -> None:
    """`kvsteward admin-token` is for machines without torch."""
    seen = "import sys, kvsteward_cli.main; print([m for m in ('torch', 'aiohttp', 'kopf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_children_are_told_what_the_policy_and_the_command_line_say(tmp_path: Path) -> None:
    options = LocalOptions(EXAMPLE, tmp_path, 1, 2, (), tmp_path / "admin", tmp_path / "gateway")
    local = Local(options, read_policy(EXAMPLE), tmp_path)
    sidecar, engine = " ".join(local.sidecar_arguments()), " ".join(local.engine_arguments())
    assert f"--gateway-secret-file {tmp_path}/gateway" in sidecar
    assert f"--admin-token-file {tmp_path}/admin" in sidecar
    assert "--port 1 --admin-port 2" in sidecar
    assert "--served-model-name smollm2-135m-instruct" in engine
    assert "--capacity 512Mi --block-tokens 16 --dtype Auto --max-tokens 4096 --max-concurrent 16" in engine
    parse(local.sidecar_arguments())
    make_parser().parse_args(local.engine_arguments())
