// npm's openai runs tools by itself: asks, calls, sends the results back, until there is an answer.
const { OpenAI } = require("openai");
const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;

const weather = {
  type: "function",
  function: {
    name: "weather", description: "The weather of a city.", parse: JSON.parse,
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    function: ({ city }) => `sunny in ${city}`,
  },
};

async function main() {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const answers = [];
  for (const stream of [false, true]) {
    const messages = [{ role: "user", content: "what is the weather in Paris?" }];
    answers.push(await client.chat.completions.runTools({ model, messages, tools: [weather], stream }).finalContent());
  }
  console.log(JSON.stringify({ answers }));
}

main();
