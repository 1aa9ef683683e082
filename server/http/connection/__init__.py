"""Guards connections below FastAPI, so that no client holds the server up by what it sends or does not
read.

A request meets the guards in this order. Each refuses it in JSON, in the shape of the API that its path
belongs to, before anything behind it runs:

1. `sockets.py`: the listening socket, its TLS, and the system's own bounds on what a connection holds.
2. `connection.py`: uvicorn's protocol for one connection, with deadlines for the first byte, the head,
   the body and the reader, and bounds on heads, framing, pipelining and connections. It answers by
   itself, as no application has seen the request yet; `connection_limits.py` has the numbers and the answers.
   `deadline_timer.py` looks at all deadlines, `refusal_log.py` writes few lines for a crowd,
   `hosts_and_proxies.py` finds the client behind a proxy.
3. The check of heads, `head_check` in `server/access/keyring.py`, which `connection.py` calls when a head
   is complete: a full server spends nothing else on a request.
4. `hosts_and_proxies.py`: the middleware that looks at host, origin, and the announced length and coding of
   the body.
5. `body_limits.py`: bodies as they are read, each of a bounded length, all within a bounded memory.

`connection.py` also finds a reader that does not read: it tells the stream
(`RequestState.follow_reader`), for which nothing more is generated then, and ends the connection if that
lasts.

What comes next is the route of the path (`server/http/endpoint.py`), and FastAPI for all others; errors are
answered with `server/http/error_answers.py`.
"""
