// The server's API: requests with the key that the user typed, answers as they come, and errors as the server says them.

const KEY = "hex-llm-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, { message, code = null, param = null }) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

export async function get(path) {
  return checked(await reach(path, { headers: headers(), cache: "no-store" }));
}

/** The events of a streamed answer, one by one. */
export async function* stream(path, body, signal) {
  const init = { method: "POST", headers: { ...headers(), "Content-Type": "application/json" } };
  const response = await checked(await reach(path, { ...init, body: JSON.stringify(body), signal }));
  let rest = "";
  for await (const text of texts(response.body)) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment, which keeps the connection alive
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(response.status, chunk.error);
      yield chunk;
    }
  }
  throw new ApiError(0, { message: "The connection ended before the answer did." });
}

function headers() {
  return key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
}

async function reach(path, init) {
  try {
    return await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached." });
  }
}

async function checked(response) {
  if (response.ok) return response;
  let told;
  try {
    told = (await response.json()).error;
  } catch {
    told = null; // something between here and the server has answered
  }
  throw new ApiError(response.status, told ?? { message: `The answer was ${response.status} ${response.statusText}.` });
}

// Not every browser can loop over a stream.
async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have ended with an error, which was told
  }
}
