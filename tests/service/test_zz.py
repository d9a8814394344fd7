from harness import *
from pair import *
from test_framing import HIDDEN, framed
async def test_a(tmp_path, session_store) -> None:
    async with running(tmp_path, session_store.url) as p:
        for data in (framed(line=b"CONNECT mail.example.test:443 HTTP/1.1"),framed(line=b"POST http://a@b/mail/emails HTTP/1.1")):
            async with await p.client() as c:
                await c.send(data)
                try: print((await c.rest(0.5)))
                except BaseException as e: print(repr(e), c.reader._buffer)
            print(p.upstream.begun)
            p.forget()
        print("------")
        data = request("POST", "/mail/other", [("Transfer-Encoding", "chunked")])
        async with await p.client() as client:
            await client.send(data + b"3\r\nabc\r\n")
            await until(lambda: p.upstream.begun)
            await client.send(b"zz\r\n" + HIDDEN)
            try: print((await client.rest(4)))
            except BaseException as e: print(repr(e), client.reader._buffer)
        print(p.upstream)
        print(p.sidecar.log()[-3000:])
