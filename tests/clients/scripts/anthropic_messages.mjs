// The `@anthropic-ai/sdk` package.
import Anthropic from "@anthropic-ai/sdk";
import { KEY, MODEL, PROMPT, URL, getWeather, parameters, tell, wait } from "./asked.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY });
const tools = [{ name: "get_weather", description: "Tell the weather.", input_schema: parameters }];
const messages = [{ role: "user", content: PROMPT }];
for (;;) {
  const stream = client.messages.stream({ model: MODEL, max_tokens: 8192, messages, tools });
  if (await tell(stream, (event) => event.delta?.text)) {
    stream.abort();
    await wait();
    break;
  }
  const answer = await stream.finalMessage();
  if (answer.stop_reason !== "tool_use") break;
  const calls = answer.content.filter((block) => block.type === "tool_use");
  const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: getWeather(call.input) }));
  messages.push({ role: "assistant", content: answer.content }, { role: "user", content: results });
}
