// The HTTP API as the page uses it.

let apiKey = "";
export function setApiKey(key) { apiKey = key; }

function headers(more = {}) {
  return apiKey ? { ...more, Authorization: `Bearer ${apiKey}` } : more;
}

async function check(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not an error of the API: the status says what is known */ }
  throw new Error(message);
}

export async function getJson(path) {
  return (await check(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

export async function getText(path) {
  return (await check(await fetch(path, { headers: headers(), cache: "no-store" }))).text();
}

/// Streams a chat completion: calls `onChunk` with each parsed chunk. Ends when the stream does; throws what the
/// server says, and AbortError when `signal` is raised.
export async function streamChat(body, signal, onChunk) {
  const response = await check(await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split(/\r?\n\r?\n/);
    held = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "" || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      onChunk(chunk);
    }
  }
}
