"""Who sent a request: keys from files, one good set at a time; a header only from a proven gateway."""

import hashlib
import os
from pathlib import Path

import pytest
from kvsteward_contract.policy import IdentitySource
from kvsteward_sidecar.tenants import (
    AMBIGUOUS,
    NOBODY,
    Credential,
    InvalidTenants,
    TenantFiles,
    read_gateway,
    read_keys,
)
from multidict import CIMultiDict

ACME, GLOBEX, NEW = "a" * 32, "g" * 40, "n" * 64
TOKEN = "t" * 32
KEY, HEADER = IdentitySource.API_KEY, IdentitySource.HEADER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tenants"
    folder.mkdir()
    (folder / "acme").write_text(ACME + "\n")
    (folder / "globex").write_text(GLOBEX)
    return folder


def files(folder: Path) -> TenantFiles:
    made = TenantFiles(KEY, folder)
    made.refresh()
    return made


def bearer(*values: str) -> CIMultiDict[str]:
    return CIMultiDict([("authorization", value) for value in values])


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        pytest.param(bearer(f"Bearer {ACME}"), Credential("acme"), id="known"),
        pytest.param(bearer(f"bearer  {GLOBEX} "), Credential("globex"), id="scheme-in-any-case"),
        pytest.param(bearer(), NOBODY, id="none"),
        pytest.param(bearer(f"Bearer {NEW}"), NOBODY, id="unknown"),
        pytest.param(bearer(f"Bearer {ACME[:-1]}"), NOBODY, id="one-character-short"),
        pytest.param(bearer(f"Basic {ACME}"), NOBODY, id="another-scheme"),
        pytest.param(bearer(ACME), NOBODY, id="no-scheme"),
        pytest.param(bearer(""), NOBODY, id="empty"),
        pytest.param(bearer(f"Bearer {ACME}, Bearer {GLOBEX}"), NOBODY, id="two-in-one"),
        pytest.param(bearer("Bearer \udcff\udcfe"), NOBODY, id="bytes-that-are-no-text"),
        pytest.param(bearer(f"Bearer {ACME}", f"Bearer {ACME}"), AMBIGUOUS, id="the-same-twice"),
        pytest.param(bearer(f"Bearer {ACME}", f"Bearer {GLOBEX}"), AMBIGUOUS, id="two-tenants"),
        pytest.param(bearer(f"Bearer {ACME}", "Bearer nobody"), AMBIGUOUS, id="a-valid-and-an-unknown-one"),
        pytest.param(bearer(f"Bearer {ACME}{' ' * 600}"), AMBIGUOUS, id="oversized"),
        pytest.param(
            CIMultiDict({"X-KV-Tenant": "acme", "X-KV-Gateway-Token": TOKEN}), NOBODY, id="the-other-source's-headers"
        ),
    ],
)
def test_a_key_names_its_tenant_or_nobody(folder: Path, headers: CIMultiDict[str], credential: Credential) -> None:
    assert files(folder).tenants.identify(headers) == credential


def test_two_keys_of_a_tenant_both_count_while_one_is_rotated(folder: Path) -> None:
    (folder / "acme").write_text(f"{ACME}\n{NEW}\n")
    tenants = files(folder).tenants
    assert tenants.identify(bearer(f"Bearer {ACME}")) == tenants.identify(bearer(f"Bearer {NEW}")) == Credential("acme")


def test_no_key_is_kept_or_shown(folder: Path) -> None:
    tenants = files(folder).tenants
    assert ACME not in repr(tenants)
    assert set(tenants.keys) == {hashlib.sha256(key.encode()).digest() for key in (ACME, GLOBEX)}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        pytest.param("initech", ACME, "acme and initech", id="the-same-key-under-two-tenants"),
        pytest.param("initech", "short", "32", id="short-key"),
        pytest.param("initech", "k" * 300, "256", id="long-key"),
        pytest.param("initech", "k" * 31 + " k", "visible", id="space-in-a-key"),
        pytest.param("initech", "\u00fc" * 32, "visible", id="not-ascii"),
        pytest.param("initech", f"{'1' * 32}\n{'2' * 32}\n{'3' * 32}", "2 keys", id="three-keys"),
        pytest.param("initech", f"{'1' * 32}\x0b{'2' * 32}", "visible", id="no-line-end-for-anybody-else"),
        pytest.param("initech", f"\ufeff{'1' * 32}", "visible", id="byte-order-mark"),
        pytest.param("initech", f"{'1' * 32}\0", "visible", id="null"),
        pytest.param("Initech", NEW, "tenant name", id="name"),
    ],
)
def test_a_bad_file_rejects_the_set_and_the_last_good_one_stays(folder: Path, name: str, text: str, says: str) -> None:
    kept = files(folder)
    (folder / "globex").write_text(NEW)
    (folder / name).write_text(text)
    assert not kept.refresh()
    assert kept.tenants.identify(bearer(f"Bearer {GLOBEX}")) == Credential("globex")
    assert kept.tenants.identify(bearer(f"Bearer {NEW}")) == NOBODY
    assert says in kept.problem
    assert ACME not in kept.problem
    with pytest.raises(InvalidTenants):
        read_keys(folder)
    (folder / name).unlink()
    assert kept.refresh()
    assert kept.problem == ""
    assert kept.tenants.identify(bearer(f"Bearer {NEW}")) == Credential("globex")


def test_a_removed_file_revokes_its_tenant_and_an_empty_folder_revokes_all(folder: Path) -> None:
    kept = files(folder)
    (folder / "globex").unlink()
    assert kept.refresh()
    assert kept.tenants.identify(bearer(f"Bearer {GLOBEX}")) == NOBODY
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == Credential("acme")
    (folder / "acme").unlink()
    assert kept.refresh()
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == NOBODY
    assert "no tenant has an API key" in kept.problem


def test_an_emptied_file_revokes_its_tenant_alone(folder: Path) -> None:
    (folder / "globex").write_text("\n")
    assert set(read_keys(folder).values()) == {"acme"}


def test_a_vanished_folder_keeps_the_last_keys_and_says_so(folder: Path) -> None:
    kept = files(folder)
    folder.rename(folder.with_name("elsewhere"))
    assert not kept.refresh()
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == Credential("acme")
    assert str(folder) in kept.problem


def test_a_folder_that_was_never_there_identifies_nobody_until_it_comes(tmp_path: Path) -> None:
    kept = files(tmp_path / "tenants")
    assert kept.problem
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == NOBODY
    (tmp_path / "tenants").mkdir()
    (tmp_path / "tenants" / "acme").write_text(ACME)
    assert kept.refresh()
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == Credential("acme")


def test_nothing_is_read_again_while_nothing_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = files(folder)
    monkeypatch.setattr("kvsteward_sidecar.tenants.read_keys", lambda _: pytest.fail("read again"))
    assert not kept.refresh()


def test_what_could_not_be_read_for_a_while_is_read_later_though_no_file_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process has too many files open: a revoked key must not stay for ever because of it."""
    kept = files(folder)
    (folder / "globex").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        assert not kept.refresh()
        assert "Too many open files" in kept.problem
    assert kept.refresh()
    assert kept.problem == ""
    assert kept.tenants.identify(bearer(f"Bearer {GLOBEX}")) == NOBODY
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == Credential("acme")


def test_the_kubelets_swap_of_a_mounted_secret_is_seen(tmp_path: Path) -> None:
    """A mounted Secret: files are links into ..data, itself a link that is replaced at once."""

    def version(name: str, **keys: str) -> None:
        (tmp_path / name).mkdir()
        for tenant, key in keys.items():
            (tmp_path / name / tenant).write_text(key)
        (tmp_path / "..data_tmp").symlink_to(name)
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")

    version("..2026_1", acme=ACME)
    (tmp_path / "acme").symlink_to("..data/acme")
    kept = files(tmp_path)
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == Credential("acme")
    version("..2026_2", acme=NEW)
    assert kept.refresh()
    assert kept.tenants.identify(bearer(f"Bearer {ACME}")) == NOBODY
    assert kept.tenants.identify(bearer(f"Bearer {NEW}")) == Credential("acme")


def gateway(tmp_path: Path) -> TenantFiles:
    (tmp_path / "token").write_text(TOKEN + "\n")
    made = TenantFiles(HEADER, None, tmp_path)
    made.refresh()
    assert made.problem == ""
    return made


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        pytest.param([("X-KV-Tenant", "acme"), ("X-KV-Gateway-Token", TOKEN)], Credential("acme"), id="proven"),
        pytest.param([("x-kv-tenant", "u@b.c"), ("x-kv-gateway-token", TOKEN)], Credential("u@b.c"), id="any-visible"),
        pytest.param([("X-KV-Tenant", "acme")], NOBODY, id="unproven"),
        pytest.param([("X-KV-Tenant", "acme"), ("X-KV-Gateway-Token", "t" * 31)], NOBODY, id="wrong-token"),
        pytest.param([("X-KV-Tenant", "acme"), ("X-KV-Gateway-Token", "")], NOBODY, id="empty-token"),
        pytest.param([("X-KV-Gateway-Token", TOKEN)], NOBODY, id="no-tenant"),
        pytest.param([("Authorization", f"Bearer {ACME}")], NOBODY, id="the-other-source's-header"),
        pytest.param(
            [("X-KV-Tenant", "acme"), ("X-KV-Tenant", "globex"), ("X-KV-Gateway-Token", TOKEN)],
            AMBIGUOUS,
            id="two-tenants",
        ),
        pytest.param(
            [("X-KV-Tenant", "acme"), ("X-KV-Gateway-Token", TOKEN), ("X-KV-Gateway-Token", "x")],
            AMBIGUOUS,
            id="two-tokens",
        ),
        pytest.param([("X-KV-Tenant", "a, b"), ("X-KV-Gateway-Token", TOKEN)], AMBIGUOUS, id="two-merged-into-one"),
        pytest.param([("X-KV-Tenant", ""), ("X-KV-Gateway-Token", TOKEN)], AMBIGUOUS, id="empty-tenant"),
        pytest.param([("X-KV-Tenant", "a" * 129), ("X-KV-Gateway-Token", TOKEN)], AMBIGUOUS, id="oversized-tenant"),
        pytest.param([("X-KV-Tenant", "acme"), ("X-KV-Gateway-Token", "t" * 600)], AMBIGUOUS, id="oversized-token"),
        pytest.param([("X-KV-Tenant", "\udcff"), ("X-KV-Gateway-Token", TOKEN)], AMBIGUOUS, id="no-text"),
    ],
)
def test_a_header_counts_only_beside_the_gateways_token(
    tmp_path: Path, headers: list[tuple[str, str]], credential: Credential
) -> None:
    assert gateway(tmp_path).tenants.identify(CIMultiDict(headers)) == credential


def test_without_a_gateway_token_no_header_counts(tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing"):
        made = TenantFiles(HEADER, None, path)
        made.refresh()
        assert made.problem
        assert made.tenants.identify(CIMultiDict({"X-KV-Tenant": "acme", "X-KV-Gateway-Token": ""})) == NOBODY


def test_a_gateways_token_may_be_a_file_or_a_mounted_folder(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    assert read_gateway(tmp_path) == read_gateway(tmp_path / "token") == (hashlib.sha256(TOKEN.encode()).digest(),)


def test_another_source_takes_effect_at_once_and_nobody_of_the_old_one_stays(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "gateway").write_text(TOKEN)
    made = TenantFiles(KEY, folder, tmp_path / "gateway")
    made.refresh()
    assert made.refresh(HEADER)
    assert made.tenants.identify(bearer(f"Bearer {ACME}")) == NOBODY
    proven = CIMultiDict({"X-KV-Tenant": "acme", "X-KV-Gateway-Token": TOKEN})
    assert made.tenants.identify(proven) == Credential("acme")
    assert made.refresh(KEY)
    assert made.tenants.identify(proven) == NOBODY
