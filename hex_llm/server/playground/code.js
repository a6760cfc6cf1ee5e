// The request as code to copy. The key is never in it: it is read from the environment.

const OPENAI = new Set([
  "model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop",
]);

export function curl(path, body, hasKey) {
  const lines = [
    `curl -N ${location.origin}${path}`,
    ...(hasKey ? ['-H "Authorization: Bearer $HEXLLM_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`,
  ];
  return lines.join(" \\\n  ");
}

export function python(path, body, hasKey) {
  const chat = path.endsWith("chat/completions");
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const given = known.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (Object.keys(others).length) given.push(`    extra_body=${literal(others, 1)},`);
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${hasKey ? 'os.environ["HEXLLM_API_KEY"]' : '"none"'})`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...given,
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    `        print(chunk.choices[0].${chat ? "delta.content or \"\"" : "text"}, end="", flush=True)`,
    "print()",
  ].join("\n");
}

/** A JSON value as Python writes it. JSON's strings are Python's, too. */
function literal(value, depth) {
  const indent = "    ".repeat(depth);
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (value.every((each) => typeof each !== "object")) return `[${value.map((each) => literal(each, 0)).join(", ")}]`;
    return `[\n${value.map((each) => `${indent}    ${literal(each, depth + 1)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, each]) => `"${name}": ${literal(each, depth)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
