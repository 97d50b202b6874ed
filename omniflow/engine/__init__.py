"""Autoregressive engines behind one protocol, so that the same actor drives each. Start here: `base`, `transformers`.

    the protocol            base, checks, stats, installed
    the thread, the ranks   loop, gathering; group, ranks
    requests                queue, batching; stops, places, content, streams
    text, the reference     transformers, rows, sampling, grammar, linear
    text, for GPUs          sglang, sglang_scheduler, sglang_outbox, sglang_grammar, sglang_penalties;
                            sglang_start, sglang_settings, sglang_environment, sglang_registry
    frames of codes         frames, decoder, heads; for GPUs sglang_frames, sglang_models
    latents (flow)          flow_engine, flow; for GPUs flow_slots, slot_cache, replays
    kernels                 fused, kernels, depth_kernels

One token: `EngineLoop._serve` -> `Engine.step` -> (transformers) `_schedule`, `_forward`, `Row.draw` ->
`EngineOutput` -> `Gathering.add` -> in the event loop `EngineLoop._deliver` -> `Generation.put` -> the actor's
`async for`. A step of SGLang's: `SteppedScheduler.step` -> `Outbox.stream_output` -> `SGLangEngine._output`.
"""
