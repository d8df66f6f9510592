"""Workers take keys from the queue and give each a turn; a failed turn comes back later."""

import asyncio
import logging
import time

from . import errors
from .index import Key
from .reconcile import Reconciler
from .telemetry import HEARTBEAT_SECONDS, Telemetry
from .workqueue import WorkQueue

log = logging.getLogger(__name__)

WORKERS = 4
TURN_SECONDS = 60.0
HEARTBEAT = Key("", "")  # belongs to no policy: shows that workers get to their work when there is none


async def work(queue: WorkQueue, reconciler: Reconciler, telemetry: Telemetry) -> None:
    """One worker, until cancelled."""
    while True:
        key = await queue.take()
        telemetry.queued.set(len(queue))
        if key == HEARTBEAT:
            telemetry.beat()
            queue.done(key, failed=False, again=HEARTBEAT_SECONDS)
            continue
        started = time.monotonic()
        again, result = None, "done"
        try:
            async with asyncio.timeout(TURN_SECONDS):
                again = await reconciler.turn(key)
        except errors.ApiError as error:
            result = type(error).__name__
            log.warning("%s/%s: %s", key.namespace, key.name, error)
        except TimeoutError:
            result = "timeout"
            log.warning("%s/%s: a turn took longer than %d s", key.namespace, key.name, TURN_SECONDS)
        except Exception:
            # A fault of ours, with one policy: the others must not wait for it.
            result = "fault"
            log.exception("%s/%s: a turn failed", key.namespace, key.name)
        telemetry.finished(result, time.monotonic() - started)
        queue.done(key, failed=result != "done", again=again)
