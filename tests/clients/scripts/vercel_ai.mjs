// Vercel's `ai` with `@ai-sdk/openai-compatible`.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";
import { KEY, MODEL, PROMPT, URL, getWeather, parameters, tell, wait } from "./asked.mjs";

const provider = createOpenAICompatible({ name: "melld", baseURL: `${URL}/v1`, apiKey: KEY, includeUsage: true });
const leaving = new AbortController();
const answer = streamText({
  model: provider(MODEL),
  system: "Be brief.",
  prompt: PROMPT,
  tools: { get_weather: tool({ description: "Tell it.", inputSchema: jsonSchema(parameters), execute: getWeather }) },
  stopWhen: stepCountIs(3),
  abortSignal: leaving.signal,
});
if (await tell(answer.textStream, (text) => text)) {
  leaving.abort();
  await wait();
}
