"""A job for helper processes that does what its orders say."""

import os
import signal
import time

import msgspec

from server.errors import NotFound
from server.helpers.job import Ended, Job
from server.helpers.messages import FollowOrder


class Told(msgspec.Struct, frozen=True, tag=True):
    text: str
    pid: int


class Setup(msgspec.Struct, frozen=True):
    greeting: str


class Order(msgspec.Struct, frozen=True):
    do: str = "tell"


def open_job(data: bytes) -> FollowOrder:
    setup, kept = msgspec.msgpack.decode(data, type=Setup), list[bytearray]()
    if setup.greeting == "exit":
        raise SystemExit(2)

    def follow(order: bytes, data: bytes) -> Told:
        match msgspec.msgpack.decode(order, type=Order).do:
            case "sleep":
                time.sleep(60)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "compute":
                while True:
                    pass
            case "hoard":
                bytearray(1 << 30)
            case "keep":
                kept.append(bytearray(b"x" * (150 << 20)))
            case "break":
                raise ZeroDivisionError
            case "refuse":
                raise NotFound("there is none", "field")
            case _:
                pass
        return Told(f"{setup.greeting} {len(data)} {data[:5].decode()}", os.getpid())

    return follow


def explain(order: Order, ended: Ended) -> NotFound | None:
    return NotFound(f"{order.do} {ended.seconds:g} {ended.code}") if order.do != "die" else None


JOB: Job[Told] = Job(
    name="tests",
    module="helper_job",
    answer=Told,
    explain=explain,
    memory=512 << 20,
    seconds=30.0,
)
