// npm's openai and its agents over realtime, which they dial by wss only. Prints one JSON object of what they got.
const { OpenAI } = require("openai");
const { OpenAIRealtimeWS } = require("openai/realtime/ws");
const { RealtimeAgent, RealtimeSession } = require("@openai/agents-realtime");
const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;

function byWebSocket() {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const realtime = new OpenAIRealtimeWS({ model }, client);
  const types = [];
  let text = "";
  return new Promise((resolve, reject) => {
    realtime.on("error", reject);
    realtime.on("event", (event) => types.push(event.type));
    realtime.on("session.created", () => {
      realtime.send({ type: "session.update", session: { type: "realtime", output_modalities: ["text"] } });
      const content = [{ type: "input_text", text: "Say hello." }];
      realtime.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
      realtime.send({ type: "response.create", response: { max_output_tokens: 12 } });
    });
    realtime.on("response.output_text.delta", (event) => { text += event.delta; });
    realtime.on("response.done", (event) => {
      realtime.close();
      resolve({ types, text, status: event.response.status });
    });
  });
}

function byAgent() {
  const agent = new RealtimeAgent({ name: "A", instructions: "Be short." });
  const session = new RealtimeSession(agent, { transport: "websocket", model });
  let sound = 0;
  return new Promise(async (resolve, reject) => {
    session.on("error", ({ error }) => reject(new Error(JSON.stringify(error))));
    session.on("audio", (event) => { sound += event.data.byteLength; });
    session.on("agent_end", (context, ended, output) => {
      const history = session.history.map((item) => item.role);
      session.close();
      resolve({ output, sound, history });
    });
    await session.connect({ apiKey, url: `${baseURL.replace("https", "wss")}/realtime?model=${model}` });
    session.sendMessage("Say hello.");
  });
}

async function main() {
  console.log(JSON.stringify({ byWebSocket: await byWebSocket(), byAgent: await byAgent() }));
  process.exit(0);
}

main();
