#!/usr/bin/env python3
"""Asks a server one question through the official OpenAI client; prints the answer as it comes, and its speed.

Usage: ask.py URL QUESTION
"""
import sys
import time


def main():
    if len(sys.argv) != 3:
        print("usage: ask.py URL QUESTION", file=sys.stderr)
        sys.exit(2)
    url, question = sys.argv[1:]
    import openai  # takes a second, and may not be installed

    client = openai.OpenAI(base_url=url + "/v1", api_key="-")
    model = client.models.list().data[0].id
    start, first, usage = time.monotonic(), None, None
    stream = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}], stream=True,
                                            stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.monotonic()
                print(choice.delta.content, end="", flush=True)
    end = time.monotonic()
    if first is None:
        sys.exit(f"{model} said nothing")
    rate = (usage.completion_tokens - 1) / max(end - first, 1e-9)
    print(f"\n[{usage.completion_tokens} tokens, first after {first - start:.2f} s ({usage.prompt_tokens} prompt tokens), "
          f"{rate:.1f} tok/s]")


if __name__ == "__main__":
    main()
