// What every script is asked, and how it tells: `node SCRIPT.mjs URL PROMPT STOP_AFTER`, with 0 for never.
export const [URL, PROMPT] = process.argv.slice(2);
export const STOP_AFTER = Number(process.argv[4]);
export const MODEL = "demo";
export const KEY = "none";
export const parameters = {
  type: "object",
  properties: { city: { type: "string" }, degrees: { type: "integer" } },
  required: ["city", "degrees"],
};

export function getWeather({ city, degrees }) {
  console.log(`get_weather(${city}, ${degrees})`);
  return "sunny";
}

// Print a stream's texts; true if it is to be left.
export async function tell(stream, textOf) {
  let count = 0;
  for await (const piece of stream) {
    const text = textOf(piece);
    if (!text) continue;
    process.stdout.write(text);
    if (++count === STOP_AFTER) return true;
  }
  return false;
}

// Stay until the harness has seen that the request has ended.
export async function wait() {
  console.log("\nleft");
  for await (const _ of process.stdin);
}
