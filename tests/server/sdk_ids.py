"""A pytest plugin for the OpenAI client's own tests. They name objects of a mock server. This plugin creates the objects on
the real server when a request first names them, for each test."""
import json
import os
import urllib.request

import openai._base_client
import pytest

from serving import ANSWER_SECONDS

RESPONSES = "resp_677efb5139a88190b512bc3fef8e535d", "response_id"
CONVERSATION, ITEM = "conv_123", "msg_abc"
made = {}


def post(path, body):
    request = urllib.request.Request(os.environ["TEST_API_BASE_URL"] + path, json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def make(name):
    """Returns the id that replaces `name` in this test."""
    if name in RESPONSES:
        made[name] = post("/responses", {"input": "Hi", "max_output_tokens": 1})["id"]
    elif name not in made:
        made[CONVERSATION] = post("/conversations", {})["id"]
        item = {"type": "message", "role": "user", "content": "Hi"}
        made[ITEM] = post(f"/conversations/{made[CONVERSATION]}/items", {"items": [item]})["data"][0]["id"]
    return made[name]


@pytest.fixture(autouse=True)
def fresh_ids(monkeypatch):
    made.clear()
    build = openai._base_client.BaseClient._build_request

    def build_request(client, options, **rest):
        for name in (*RESPONSES, CONVERSATION, ITEM):
            if name in options.url.split("/"):
                options.url = options.url.replace(name, made.get(name) or make(name))
        return build(client, options, **rest)
    monkeypatch.setattr(openai._base_client.BaseClient, "_build_request", build_request)
