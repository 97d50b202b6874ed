// npm's openai over HTTP. Prints one JSON object of what it got.
const { OpenAI, toFile } = require("openai");
const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;

async function main() {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const messages = [{ role: "user", content: "Say hello." }];
  const asked = { model, messages, max_completion_tokens: 12, temperature: 0, seed: 1 };
  const whole = await client.chat.completions.create(asked);

  const runner = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const streamed = await runner.finalChatCompletion();

  const spokenRunner = client.chat.completions.stream({
    ...asked, modalities: ["text", "audio"], audio: { voice: "alloy", format: "pcm16" },
  });
  let sound = "", transcript = "";
  for await (const chunk of spokenRunner) {
    sound += chunk.choices[0]?.delta?.audio?.data ?? "";
    transcript += chunk.choices[0]?.delta?.audio?.transcript ?? "";
  }

  const said = "The meeting begins at nine.";
  const speech = await client.audio.speech.create({ model, voice: "alloy", input: said, response_format: "wav" });
  const wav = Buffer.from(await speech.arrayBuffer());
  const heard = await client.audio.transcriptions.create({ model, file: await toFile(wav, "speech.wav") });

  const errors = [];
  for (const wrong of [{ ...asked, model: "nobody" }, { ...asked, temperature: 7 }]) {
    await client.chat.completions.create(wrong).catch((error) =>
      errors.push([error.constructor.name, error.status, error.code, error.param, Boolean(error.requestID)]));
  }
  await new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).models.list().catch((error) =>
    errors.push([error.constructor.name, error.status, error.code, error.param, Boolean(error.requestID)]));

  console.log(JSON.stringify({
    models: (await client.models.list()).data.map((each) => each.id),
    whole: whole.choices[0].message.content,
    streamed: streamed.choices[0].message.content,
    usage: [whole.usage.completion_tokens, streamed.usage.completion_tokens],
    transcript, sound: Buffer.from(sound, "base64").length,
    wav: wav.subarray(0, 4).toString(), heard: heard.text, errors,
  }));
}

main();
