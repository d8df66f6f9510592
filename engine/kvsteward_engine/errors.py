"""Every error the engine raises on purpose, named by what the reader of it can do.

EngineError
├── StartError            the process can't start; the message says what to change
│   ├── UnsupportedModel      a sound checkpoint of a kind this engine doesn't run
│   ├── BadCheckpoint         files missing, truncated or contradicting each other
│   ├── UnsupportedDevice     the device is absent, or can't do the wanted number format
│   └── NotDeterministic      --deterministic was asked for and the self-check failed
├── InvalidRequest        the request can't be served as it stands (HTTP 400)
├── QueueFull             too much is waiting already (HTTP 429, try again later)
├── OutOfMemory           a forward pass found no device memory; the engine makes room and tries again
├── EngineFailed          the engine broke underneath a request (HTTP 500, or a cut stream)
└── BrokenInvariant       a bug of the engine: pages or queues used in a way that can't be right
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors of the engine; the message is one sentence a user can act on."""


class StartError(EngineError):
    """The engine can't start with these settings; `serve` prints the message and exits."""


class UnsupportedModel(StartError):
    """The checkpoint is of a kind this engine doesn't run; the message names what it met."""


class BadCheckpoint(StartError):
    """Checkpoint files are missing, truncated, or contradict each other."""


class UnsupportedDevice(StartError):
    """The device is not there, or can't compute in the wanted number format."""


class NotDeterministic(StartError):
    """The start-up self-check of `--deterministic` found bits that depend on the batch."""


class InvalidRequest(EngineError):
    """The request itself is at fault; nothing was queued."""


class QueueFull(EngineError):
    """The bounded queue is full; the client may try again after a while."""


class OutOfMemory(EngineError):
    """A step didn't fit into the device's free memory; nothing was sampled, and no page lost what it held."""


class EngineFailed(EngineError):
    """The engine failed while it worked on the request."""


class BrokenInvariant(EngineError):
    """A call that can't be right (a page freed twice, a page published before its parent): a bug, never the user's."""
