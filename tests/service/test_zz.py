import asyncio
from harness import *
from pair import *
from test_framing import HIDDEN, framed
import time
async def test_a(tmp_path, session_store) -> None:
    async with running(tmp_path, session_store.url) as p:
      for target in ("/mail/emails", "/mail/other"):
        for bad in (b"zz\r\n" + HIDDEN, b"zz\r\n", b"+3\r\nabc\r\n0\r\n\r\n"):
            data = request("POST", target, [("Transfer-Encoding", "chunked")], key=str(time.monotonic()))
            async with await p.client() as client:
                await client.send(data + b"3\r\nabc\r\n")
                await asyncio.sleep(0.2)
                t=time.monotonic()
                await client.send(bad)
                try: print((await client.rest(20)))
                except BaseException as e: print(repr(e), client.reader._buffer)
                print(target, bad[:10], time.monotonic()-t)
      print(p.sidecar.log()[-3000:])
      print(p.upstream.begun, p.count)
