// The `openai` package for JavaScript, chat completions and their tool loop.
import OpenAI from "openai";
import { KEY, MODEL, PROMPT, STOP_AFTER, URL, getWeather, parameters, tell, wait } from "./asked.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const name = "get_weather";
const tool = { type: "function", function: { name, parameters, parse: JSON.parse, function: getWeather } };
const messages = [{ role: "user", content: PROMPT }];
const runner = client.chat.completions.runTools({ model: MODEL, messages, tools: [tool], stream: true });
const left = await tell(runner, (piece) => piece.choices[0]?.delta?.content);
if (left) {
  runner.abort();
  await wait();
}
