"""Who sent a request: API keys from a mounted folder, or a header that a proven gateway sets.

`Tenants` is frozen: one good state of the mounted secrets, replaced as a whole. `TenantFiles` reads them and keeps the
last good state when what it finds can't be used. Keys are held as SHA-256 digests only. Missing and unknown
credentials are treated alike, so that nobody learns which keys exist.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvsteward_contract.policy import IdentitySource
from kvsteward_contract.wire import GATEWAY_SECRET_KEY, GATEWAY_TOKEN_HEADER, TENANT_HEADER
from multidict import MultiMapping

MIN_KEY = 32  # characters
MAX_KEY = 256
MAX_CREDENTIAL = 512  # characters of a header value; a longer one is nobody's
MAX_KEYS_A_TENANT = 2  # the old and the new one while a key is rotated
MAX_FILE = 4096  # bytes

_TENANT = re.compile(r"[a-z0-9.-]{1,63}")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY},{MAX_KEY}}}")
_HEADER_TENANT = re.compile(r"[!-+\--~]{1,128}")  # visible ASCII but the comma, which a merged, repeated header has


class InvalidTenants(ValueError):
    """The mounted secrets can't be used as they are; the text names the file and what to change in it."""


@dataclass(frozen=True, slots=True)
class Credential:
    """`tenant` None: nobody we know. `ambiguous`: it could be read two ways, so it names nobody."""

    tenant: str | None
    ambiguous: bool = False


NOBODY = Credential(None)
AMBIGUOUS = Credential(None, ambiguous=True)


@dataclass(frozen=True, slots=True)
class Tenants:
    """One good state of the secrets."""

    source: IdentitySource
    keys: Mapping[bytes, str] = field(default_factory=dict, repr=False)  # SHA-256 of a key -> tenant
    gateway: tuple[bytes, ...] = field(default=(), repr=False)  # SHA-256 of each valid gateway token
    _by_prefix: dict[bytes, tuple[tuple[bytes, str], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[bytes, tuple[tuple[bytes, str], ...]] = {}
        for digest, tenant in self.keys.items():
            index[digest[:8]] = (*index.get(digest[:8], ()), (digest, tenant))
        object.__setattr__(self, "_by_prefix", index)

    def identify(self, headers: MultiMapping[str]) -> Credential:
        """The sender, from the headers of the source in force; those of the other source are not looked at."""
        if self.source is IdentitySource.API_KEY:
            return self._by_key(headers.getall("Authorization", ()))
        return self._by_gateway(headers.getall(TENANT_HEADER, ()), headers.getall(GATEWAY_TOKEN_HEADER, ()))

    def _by_key(self, values: list[str] | tuple[str, ...]) -> Credential:
        if not values:
            return NOBODY
        if len(values) > 1 or len(values[0]) > MAX_CREDENTIAL:
            return AMBIGUOUS
        scheme, _, key = values[0].partition(" ")
        if scheme.lower() != "bearer":
            return NOBODY
        digest = _digest(key.strip(" \t"))
        tenant = None
        # Found by the digest's start, then compared in full in constant time: time tells nothing about any key.
        for known, owner in self._by_prefix.get(digest[:8], ()):
            if hmac.compare_digest(known, digest):
                tenant = owner
        return NOBODY if tenant is None else Credential(tenant)

    def _by_gateway(self, tenants: list[str] | tuple[str, ...], tokens: list[str] | tuple[str, ...]) -> Credential:
        if len(tenants) > 1 or len(tokens) > 1:
            return AMBIGUOUS
        if not tenants or not tokens:
            return NOBODY
        if len(tenants[0]) > MAX_CREDENTIAL or len(tokens[0]) > MAX_CREDENTIAL:
            return AMBIGUOUS
        digest = _digest(tokens[0])
        proven = [hmac.compare_digest(known, digest) for known in self.gateway]
        if not any(proven):
            return NOBODY
        return Credential(tenants[0]) if _HEADER_TENANT.fullmatch(tenants[0]) else AMBIGUOUS


class TenantFiles:
    """The mounted secrets. `refresh` is cheap when nothing changed, so it can be called every second.

    `keys`: folder with one file a tenant (a mounted Secret: entries that start with ".." are the kubelet's own).
    `gateway`: a file with the gateway's token, or the folder of a mounted Secret with the key `token`.
    """

    def __init__(self, source: IdentitySource, keys: Path | None, gateway: Path | None = None) -> None:
        self._keys, self._gateway = keys, gateway
        self._seen: object = None
        self.tenants = Tenants(source)  # the last good state
        self.problem = ""  # why nobody, or not everybody, can be identified; one sentence, names no key

    def refresh(self, source: IdentitySource | None = None) -> bool:
        """Reads again what changed. True when `tenants` was replaced; on an error the last good keys stay."""
        wanted = self.tenants.source if source is None else source
        stamp = (wanted, _stamp(self._keys), _stamp(self._gateway))
        if stamp == self._seen:
            return False
        self._seen = stamp
        last = self.tenants
        new = replace(last, source=wanted)
        try:
            self.problem = ""
            if wanted is IdentitySource.API_KEY:
                new = Tenants(wanted, keys=read_keys(self._keys))
                if not new.keys:
                    self.problem = f"no tenant has an API key in {self._keys}: every request counts as unidentified"
            else:
                new = Tenants(wanted, gateway=read_gateway(self._gateway))
        except InvalidTenants as error:
            self.problem = str(error)
            self._seen = None  # what hindered it may pass without a change of the files: too many of them open, say
        self.tenants = new
        return new != last


def read_keys(folder: Path | None) -> dict[bytes, str]:
    """SHA-256 of every key -> its tenant. A folder without files revokes all. Raises InvalidTenants."""
    if folder is None:
        raise InvalidTenants("no folder of API keys was given: pass --tenant-keys")
    keys: dict[bytes, str] = {}
    try:
        for file in sorted(folder.iterdir()):
            if file.name.startswith(".."):
                continue
            for digest in _read_lines(file, MAX_KEYS_A_TENANT):
                if not _TENANT.fullmatch(file.name):
                    raise InvalidTenants(f"{file.name!r} in {folder} is no tenant name: use a-z, 0-9, '.' and '-'")
                if keys.setdefault(digest, file.name) != file.name:
                    raise InvalidTenants(f"tenants {keys[digest]} and {file.name} have the same API key in {folder}")
    except OSError as error:
        raise InvalidTenants(f"the API keys in {folder} cannot be read: {error.strerror}") from None
    return keys


def read_gateway(path: Path | None) -> tuple[bytes, ...]:
    """SHA-256 of the gateway's token or, while it is rotated, of both. Raises InvalidTenants."""
    if path is None:
        raise InvalidTenants("no gateway token was given: pass --gateway-secret-file")
    try:
        file = path / GATEWAY_SECRET_KEY if path.is_dir() else path
        return tuple(_read_lines(file, MAX_KEYS_A_TENANT))
    except OSError as error:
        raise InvalidTenants(f"the gateway token in {path} cannot be read: {error.strerror}") from None


def _read_lines(file: Path, most: int) -> list[bytes]:
    with file.open("rb") as opened:
        data = opened.read(MAX_FILE + 1)
    # Only what ends lines in a Secret: any other byte that isn't a key's is to be refused, not taken for an end.
    lines = [line.strip(b" \t\r").decode("latin-1") for line in data.split(b"\n")]
    lines = [line for line in lines if line]
    if len(data) > MAX_FILE or len(lines) > most:
        raise InvalidTenants(f"{file} has more than {most} keys: keep at most {most} lines")
    for line in lines:
        if not _KEY.fullmatch(line):
            raise InvalidTenants(f"{file} has a key that is not {MIN_KEY} to {MAX_KEY} visible ASCII characters")
    return [_digest(line) for line in lines]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _stamp(path: Path | None) -> object:
    """What changes whenever the mounted files do: the kubelet swaps `..data`, people write files."""
    if path is None:
        return None
    try:
        if not path.is_dir():
            entries = [path]
        else:
            entries = [path, *sorted(path.iterdir())]
        return tuple((entry.name, *_identity(entry)) for entry in entries)
    except OSError as error:
        return error.errno


def _identity(entry: Path) -> tuple[int, int, int]:
    status = entry.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
