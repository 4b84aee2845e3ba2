"""A do-nothing extender: the least that an extender in this stack can cost. Baseline of benchmarks.

aiohttp and msgspec, echoes all names, scores all nodes alike. `python bench/null_extender.py PORT`;
port 0: any free one; it prints the port.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
from aiohttp import web


class Args(msgspec.Struct):
    """The names of ExtenderArgs; all else is skipped."""

    NodeNames: list[str]


decoder = msgspec.json.Decoder(Args)
encoder = msgspec.json.Encoder()


async def answer_filter(request: web.Request) -> web.Response:
    names = decoder.decode(await request.read()).NodeNames
    body = encoder.encode({"NodeNames": names, "FailedNodes": {}, "Error": ""})
    return web.Response(body=body, content_type="application/json")


async def answer_prioritize(request: web.Request) -> web.Response:
    names = decoder.decode(await request.read()).NodeNames
    body = encoder.encode([{"Host": name, "Score": 5} for name in names])
    return web.Response(body=body, content_type="application/json")


async def main(port: int) -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/filter", answer_filter)
    app.router.add_post("/prioritize", answer_prioritize)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
