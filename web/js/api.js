// Calls the HTTP API.

/// An error that the server answered.
export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
  /// True if a key is missing or has no permission. Another origin is refused with 403 as well.
  get needsKey() { return this.status === 401 || this.status === 403 && this.code !== "origin_not_allowed"; }
}

/// API keys, set by the settings. /state gets the admin key where it differs.
export const keys = { api: "", admin: "" };

const headers = (key, more = {}) => key ? { ...more, authorization: `Bearer ${key}` } : more;

async function check(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  let code = "";
  try {
    ({ message, code } = (await response.json()).error);
  } catch { /* The body is not an error of the API, so its status is shown. */ }
  throw new ApiError(response.status, message, code);
}

const get = async (path, key) => check(await fetch(path, { headers: headers(key), cache: "no-store" }));

export const getModels = async () => (await (await get("v1/models", keys.api)).json()).data;
export const getMetrics = async () => (await get("metrics", keys.admin || keys.api)).text();
export const getState = async () => (await get("state", keys.admin || keys.api)).json();

/// Streams a chat completion and calls `onChunk` with each parsed chunk. Throws ApiError, an AbortError when `signal`
/// is raised, and a TypeError when the connection fails or ends before the answer is complete.
export async function streamChat(body, signal, onChunk) {
  const response = await check(await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(keys.api, { "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the connection ended before the answer did");
    held += value;
    const events = held.split(/\r?\n\r?\n/);
    held = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "") continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      onChunk(chunk);
    }
  }
}
