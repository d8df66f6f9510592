"""`kvsteward plan`, `advise` and `lint` as a user meets them, the page about them included."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvsteward_bench.plan import advice, catalogue
from kvsteward_bench.plan.architectures import shape_of
from kvsteward_bench.plan.arithmetic import Wish, plan
from kvsteward_bench.plan.errors import CannotPlan
from kvsteward_cli.main import main
from kvsteward_cli.planning.main import ADVISE_EXAMPLES, LINT_EXAMPLES, PLAN_EXAMPLES
from kvsteward_cli.planning.models import offered, refusals
from kvsteward_contract.policy import DType

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "policy.yaml"
SMALL = ROOT / "bench" / "kvsteward_bench" / "plan" / "models" / "smollm2-135m.json"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main([*arguments]) == status
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("kvsteward: ")
    return said.err


def edited(folder: Path, **fields: Any) -> str:
    policy = yaml.safe_load(EXAMPLE.read_text())
    for path, value in fields.items():
        part, _, field = path.partition("__")
        policy["spec"][part][field] = value
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    return str(folder / "policy.yaml")


# ---- plan


def test_a_plan_in_json_has_the_keys_that_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    planned = answer(
        capsys, "plan", "--model", "llama-3.1-70b", "--tokens", "128K", "--pool", "8Gi", "--dtype", "FP8", "--json"
    )
    assert planned["bytesPerToken"] == 160 << 10
    assert planned["fixedBytes"] == 0
    assert planned["totalBytes"] == 20 * GIB
    assert planned["poolTokens"] == 52_428
    assert [step["technique"] for step in planned["steps"]] == ["FullAttention", "GQA", "Dtype"]
    assert {"bytesPerToken", "fixedBytes", "totalBytes", "detail"} <= planned["steps"][0].keys()


@pytest.mark.parametrize("dtype", ["FP16", "FP8", "INT8", "INT4"])
def test_pages_that_no_policy_can_ask_for_yet_are_planned_and_said_not_to_be_served(
    capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    arguments = ["--model", "smollm2-135m", "--dtype", dtype]
    said = answer(capsys, "plan", *arguments, "--json")["notServed"]
    assert said == ([] if dtype in {one.value for one in DType} else [f"{dtype} pages"])
    assert main(["plan", *arguments]) == 0
    assert ("planned, not served by this engine yet" in capsys.readouterr().out) == bool(said)


def test_a_model_that_the_engine_does_not_run_is_planned_with_the_engines_own_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from kvsteward_engine.config import parse_config
    from kvsteward_engine.errors import StartError

    for name in catalogue.names():
        said = answer(capsys, "plan", "--model", name, "--tokens", "64", "--json")["notServed"]
        if said:
            with pytest.raises(StartError) as refusal:
                parse_config(catalogue.load(name), name)
            assert said == [str(refusal.value)]
        else:
            parse_config(catalogue.load(name), name)


def test_the_policy_gives_what_no_flag_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = edited(tmp_path, cache__capacity="64Mi", cache__dtype="FP32", cache__blockTokens=32)
    planned = answer(capsys, "plan", "-f", file, "--config", str(SMALL), "--json")
    assert (planned["tokens"], planned["dtype"], planned["poolBytes"]) == (4096, "FP32", 64 << 20)
    assert planned["poolTokens"] == (64 << 20) // (46_080 * 32) * 32
    changed = answer(
        capsys, "plan", "-f", file, "--config", str(SMALL), "--json", "--pool", "1Gi", "--dtype", "BF16", "--tokens",
        "1K", "--block-tokens", "1",
    )  # fmt: skip
    assert (changed["tokens"], changed["dtype"], changed["poolTokens"]) == (1024, "BF16", GIB // 23_040)


def test_a_policy_alone_is_planned_by_its_models_name_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planned = answer(capsys, "plan", "-f", str(EXAMPLE), "--tokens", "1024", "--json")
    assert planned["bytesPerToken"] == 23_040
    assert "model's name" in planned["notes"][0] or "model name" in planned["notes"][0]
    policy = yaml.safe_load(EXAMPLE.read_text())
    policy["spec"]["engine"]["model"]["name"] = "our-own"
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
    said = refused(capsys, "plan", "-f", str(tmp_path / "policy.yaml"), "--tokens", "1024")
    assert "our-own" in said and "--config" in said and "8 KiB a token" in said


def test_a_folder_with_a_config_is_read_and_the_models_context_is_the_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(SMALL.read_bytes())
    assert answer(capsys, "plan", "--config", str(tmp_path), "--json")["tokens"] == 8192


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, "No such file", id="absent"),
        pytest.param(b"{", "is no JSON", id="broken"),
        pytest.param(b"\xff\xfe\x00", "is no JSON", id="not-text"),
        pytest.param(b"[1]", "no JSON object", id="a-list"),
        pytest.param(b"{}", "describes no model", id="empty"),
        pytest.param(b'{"model_type": "rwkv"}', "does not know", id="unknown"),
        pytest.param(b'{"model_type": "llama", "num_attention_heads": null}', "is missing", id="null"),
        pytest.param(b'{"model_type": {"a": 1}, "architectures": 5}', "does not know", id="nonsense"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert said in refused(capsys, "plan", "--config", str(tmp_path / "config.json"), "--tokens", "8")


WEIRD: list[Any] = [None, 0, -1, 1.5, 10**30, True, "x", [], [0], ["x"], {}, {"a": 1}]


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "qwen2.5-7b",
        "gemma-3n-e4b",
        "deepseek-v3.2",
        "deepseek-v4-flash",
        "qwen3-next-80b",
        "jamba-v0.1",
    ],
)
def test_whatever_a_config_says_the_answer_is_a_plan_or_one_sentence(name: str) -> None:
    raw = catalogue.load(name)
    inner = raw.get("text_config", raw)
    planned, said = 0, []
    for part, key in [*((raw, key) for key in raw), *((inner, key) for key in inner)]:
        kept = part[key]
        for value in WEIRD:
            part[key] = value
            try:
                plan(shape_of(raw), Wish(5000, pool=1 << 30))
            except CannotPlan as cannot:
                said.append(str(cannot))
            else:
                planned += 1
            said += refusals(raw, "config.json")
        part[key] = kept
    assert planned and said
    assert all(text and "\n" not in text for text in said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["--tokens", "8"], "give a model", id="no-model"),
        pytest.param(["--model", "gpt-9"], "not a model this command knows", id="unknown-name"),
        pytest.param(["--model", "llama-3.1-8b", "--tokens", "many"], "not a number of tokens", id="tokens"),
        pytest.param(["--model", "llama-3.1-8b", "--pool", "8GB"], "--pool", id="pool"),
        pytest.param(["--model", "llama-3.1-8b", "--offload", "x"], "--offload", id="offload"),
        pytest.param(["--model", "llama-3.1-8b", "--block-tokens", "0"], "at least one token", id="pages"),
        pytest.param(["--model", "llama-3.1-8b", "--token-budget", "0"], "1 to 100", id="budget"),
        pytest.param(["--model", "gemma-2-none"], "not a model", id="nearly-a-name"),
        pytest.param(["--model", "gemma-3-4b", "--shared-prefix", "9K", "--tokens", "8K"], "leaves nothing", id="all"),
        pytest.param(["-f", "/nowhere.yaml"], "can't be read", id="no-policy"),
        pytest.param(["-f", "README.md"], "is no", id="no-yaml"),
        pytest.param(["-f", "crds/kvcachepolicies.kvsteward.dev.yaml"], "holds 0", id="another-kind"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refused(capsys, "plan", *arguments)


def test_a_policy_that_is_not_accepted_is_not_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, "plan", "-f", edited(tmp_path, cache__dtype="FP4"), "--config", str(SMALL))
    assert "cache.dtype" in said


# ---- advise


def test_every_situation_is_answered_when_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    answers = answer(capsys, "advise", "--json")["situations"]
    assert [one["situation"] for one in answers] == [one.key for one in advice.SITUATIONS]
    named = {technique["technique"] for one in answers for technique in one["techniques"]}
    assert named == {technique.name for technique in advice.TECHNIQUES} and len(named) == 12
    for one in answers:
        assert one["first"] and all(technique["tradeOff"] for technique in one["techniques"])


@pytest.mark.parametrize(
    ("flag", "first"),
    [
        ("--memory-full", "Quantised pages"),
        ("--slow-attention", "Query-aware sparse reads"),
        ("--duplicate-prompts", "Prefix reuse"),
        ("--fragmentation", "Paging"),
        ("--idle-sessions", "Host offload"),
        ("--choosing-model", "GQA, MQA"),
    ],
)
def test_a_constraint_is_answered_by_the_technique_that_handles_it(
    capsys: pytest.CaptureFixture[str], flag: str, first: str
) -> None:
    (only,) = answer(capsys, "advise", flag, "--json")["situations"]
    assert only["techniques"][0]["technique"] == first


def test_constraints_are_answered_in_the_order_they_are_named_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--fragmentation", "--memory-full", "--fragmentation")
    answers = answer(capsys, "advise", *flags, "--json")["situations"]
    assert [one["situation"] for one in answers] == ["fragmentation", "memory-full"]


def test_a_technique_of_training_is_not_offered_to_a_model_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = answer(capsys, "advise", "--choosing-model", "--model", "gemma-3-4b", "--json")["situations"]
    has = {one["technique"]: one["inThisModel"] for one in found["techniques"]}
    assert {name for name, there in has.items() if there} == {"GQA, MQA", "Sliding windows"}
    assert main(["advise", "--slow-attention", "--model", "qwen3-8b"]) == 0
    assert "this model does not have it, and no setting can add it" in capsys.readouterr().out


def test_fields_that_no_policy_has_yet_are_said_to_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    techniques = {
        technique["technique"]: technique
        for one in answer(capsys, "advise", "--json")["situations"]
        for technique in one["techniques"]
    }
    assert techniques["Paging"]["served"] is True
    assert techniques["Prefix reuse"]["served"] is True
    for name, field in (("Host offload", "offload"), ("Query-aware sparse reads", "sparseReads")):
        assert techniques[name]["served"] is offered(field)
    assert offered("capacity") and not offered("colour")


# ---- lint


def test_exit_status_and_json_say_how_bad_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    clean = answer(capsys, "lint", edited(tmp_path, engine__replicas=2), "-o", "json")
    assert (clean["result"], clean["findings"]) == ("clean", [])
    risky = answer(capsys, "lint", str(EXAMPLE), "--json", status=1)
    assert risky["result"] == "risks"
    (finding,) = risky["findings"]
    assert finding.keys() == {"policy", "level", "code", "field", "message"}
    assert (finding["policy"], finding["code"]) == ("support-chat", "OneReplica")
    broken = answer(capsys, "lint", edited(tmp_path, rollout__stage="Half"), "-o", "json", status=2)
    assert (broken["result"], broken["findings"][0]["field"]) == ("invalid", "spec.rollout.stage")


def test_the_text_names_field_and_reason_and_ends_with_the_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = edited(tmp_path, rollout__protectedPercent=0, rollout__stage="Full")
    assert main(["lint", file]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("support-chat: risk NoProtectedGroup: spec.rollout.protectedPercent: 0 at stage Full")
    assert lines[-1] == f"{file}: valid, 2 risks"
    assert main(["lint", edited(tmp_path, cache__capacity="1Ki")]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "support-chat: error CapacityTooSmall: spec.cache.capacity is below 1Mi: no page pool fits in it",
        f"{file}: invalid, 1 error",
    ]


def test_a_model_that_the_engine_does_not_run_makes_the_policy_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    config = SMALL.with_name("jamba-v0.1.json")
    found = answer(capsys, "lint", str(EXAMPLE), "--config", str(config), "-o", "json", status=2)["findings"]
    assert found[0]["code"] == "NotServed"


def test_every_policy_of_a_file_is_looked_at_and_other_kinds_are_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = yaml.safe_load(EXAMPLE.read_text())
    other = {**policy, "metadata": {"name": "second"}}
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all([policy, {"kind": "Secret", "metadata": {"name": "s"}}, other]))
    found = answer(capsys, "lint", str(file), "-o", "json", status=1)["findings"]
    assert [one["policy"] for one in found] == ["support-chat", "second"]


def test_a_policy_comes_from_stdin_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(EXAMPLE.read_bytes())))
    assert answer(capsys, "lint", "-", "-o", "json", status=1)["file"] == "-"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("a: [", "is no YAML", id="broken"),
        pytest.param("kind: Secret", "holds no KVCachePolicy", id="another-kind"),
        pytest.param("", "holds no KVCachePolicy", id="empty"),
        pytest.param("kind: KVCachePolicy\nspec: {a: 1}\nkind: KVCachePolicy", "'kind' occurs twice", id="key-twice"),
        pytest.param("spec: {rollout: {killSwitch: Engaged, killSwitch: Released}}", "'killSwitch' occurs", id="deep"),
        pytest.param("a: !!python/object/apply:os.getcwd []", "is no YAML", id="a-python-object"),
        pytest.param("\x00", "is no YAML", id="binary"),
        pytest.param("[" * 5000, "is no YAML", id="too-deep"),
        pytest.param("? [a]\n: 1", "is no YAML", id="a-list-as-a-key"),
    ],
)
def test_a_file_that_is_no_policy_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    assert said in refused(capsys, "lint", str(tmp_path / "policy.yaml"))


# ---- what is written about them


def commands_of(text: str) -> list[str]:
    return re.findall(r"^(?:  )?(kvsteward (?:plan|advise|lint)\b.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("command", commands_of((ROOT / "docs" / "planning.md").read_text()))
def test_the_commands_of_the_page_work(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status = main(shlex.split(command)[1:])
    assert status == (1 if " lint " in command else 0)
    assert capsys.readouterr().out


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    assert main(["plan", "--model", "llama-3.1-70b", "--tokens", "128K", "--pool", "80Gi"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r"(technique|FullAttention|GQA) ", line)]
    assert "\n".join(rows) in page


@pytest.mark.parametrize("command", commands_of(PLAN_EXAMPLES + ADVISE_EXAMPLES + LINT_EXAMPLES))
def test_the_examples_in_the_help_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "policy.yaml").write_bytes(EXAMPLE.read_bytes())
    (tmp_path / "config.json").write_bytes(SMALL.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) in (0, 1)
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "advise", "lint"])
def test_the_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  kvsteward {command}" in capsys.readouterr().out


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from kvsteward_cli.main import main; main(['plan', '--model', 'qwen3-8b', '--json']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers', 'aiohttp', 'kopf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
