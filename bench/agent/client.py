"""A load generator over HTTP/1.1: streams completions of token ids and records the time of each chunk. Standard library only."""
import asyncio
import dataclasses
import json
import time
import urllib.parse


@dataclasses.dataclass
class Outcome:
    sent: float = 0.0  # seconds after the start of the run
    first: float = 0.0  # to the first token
    gaps: list = dataclasses.field(default_factory=list)  # between chunks
    total: float = 0.0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    error: str = ""


async def complete(url, model, call, extra, outcome):
    """Sends one call and fills `outcome`. Works with every server that speaks OpenAI's /v1/completions."""
    parts = urllib.parse.urlsplit(url)
    body = {"model": model, "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, **extra}
    payload = json.dumps(body).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n")
    began = last = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(head.encode() + payload)
        await writer.drain()
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            outcome.error = status.strip() + " " + (await reader.read(2000)).decode(errors="replace")[-300:]
            return
        async for line in reader:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = json.loads(data)
            now = time.perf_counter()
            if chunk.get("choices") and not outcome.first:
                outcome.first = now - began
            elif chunk.get("choices"):
                outcome.gaps.append(now - last)
            last = now
            usage = chunk.get("usage")
            if usage:
                outcome.prompt, outcome.output = usage["prompt_tokens"], usage["completion_tokens"]
                outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        outcome.total = time.perf_counter() - began
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        writer.close()


async def replay(url, model, sessions, concurrency, extra=None):
    """Runs every session, `concurrency` at once; returns (outcomes, seconds)."""
    gate, outcomes, began = asyncio.Semaphore(concurrency), [], time.perf_counter()

    async def client(session):
        await asyncio.sleep(max(0.0, session[0].at - (time.perf_counter() - began)))
        async with gate:
            for call in session:
                outcome = Outcome(sent=time.perf_counter() - began)
                outcomes.append(outcome)
                await complete(url, model, call, extra or {}, outcome)

    await asyncio.gather(*(client(session) for session in sessions))
    return outcomes, time.perf_counter() - began
