"""omniflow: omni-modal models as a typed dataflow graph of supervised actors.

What a graph file, an actor and a program that runs graphs need, in one name space. Each name is loaded when it is
first used, so that `import omniflow` costs a few milliseconds and brings no other library with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omniflow.actor import Actor, Context, Emit, NamedVoice, Outputs, Stream, batched
    from omniflow.config import RuntimeConfig, ServerConfig
    from omniflow.errors import (
        ActorBrokenError,
        CancelledError,
        ConfigError,
        ContextLengthError,
        DeadlineError,
        DeviceError,
        EdgeFullError,
        GraphError,
        InvalidInputError,
        NotFoundError,
        OmniflowError,
        OverloadedError,
        PlanError,
        ProtocolError,
        RecordingError,
        RequestError,
        StageDiedError,
        StageError,
        StartError,
        UnavailableError,
        UnsupportedError,
        WeightsError,
    )
    from omniflow.graph import Graph
    from omniflow.media import (
        AudioChunk,
        AudioFeatures,
        AudioPart,
        Chat,
        ChatMessage,
        Generated,
        HiddenStates,
        ImageFeatures,
        ImagePart,
        Images,
        Latents,
        Options,
        Part,
        Picture,
        Prompt,
        PromptMessage,
        Segment,
        TextDelta,
        TextLogprob,
        TextPart,
        TokenLogprob,
        TokenPrompt,
        Tokens,
        Tool,
        ToolCall,
        ToolCallDelta,
        Transcript,
        VideoPart,
        VoiceCode,
        VoiceSample,
        Waveforms,
        Word,
    )
    from omniflow.planner import Cluster, Gpu, Plan, cluster_named, plan
    from omniflow.reply import Output, Reply
    from omniflow.runtime import Runtime
    from omniflow.topology import CHECKPOINT, Budget, Checkpoint, GraphSpec, Restart, Stage, absent, bind, one_for_one

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorBrokenError",
    "AudioChunk",
    "AudioFeatures",
    "AudioPart",
    "Budget",
    "CHECKPOINT",
    "CancelledError",
    "Chat",
    "ChatMessage",
    "Checkpoint",
    "Cluster",
    "ConfigError",
    "Context",
    "ContextLengthError",
    "DeadlineError",
    "DeviceError",
    "EdgeFullError",
    "Emit",
    "Generated",
    "Gpu",
    "Graph",
    "GraphError",
    "GraphSpec",
    "HiddenStates",
    "ImageFeatures",
    "ImagePart",
    "Images",
    "InvalidInputError",
    "Latents",
    "NamedVoice",
    "NotFoundError",
    "OmniflowError",
    "Options",
    "Output",
    "Outputs",
    "OverloadedError",
    "Part",
    "Picture",
    "Plan",
    "PlanError",
    "Prompt",
    "PromptMessage",
    "ProtocolError",
    "RecordingError",
    "Reply",
    "RequestError",
    "Restart",
    "Runtime",
    "RuntimeConfig",
    "Segment",
    "ServerConfig",
    "Stage",
    "StageDiedError",
    "StageError",
    "StartError",
    "Stream",
    "TextDelta",
    "TextLogprob",
    "TextPart",
    "TokenLogprob",
    "TokenPrompt",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Transcript",
    "UnavailableError",
    "UnsupportedError",
    "VideoPart",
    "VoiceCode",
    "VoiceSample",
    "Waveforms",
    "WeightsError",
    "Word",
    "__version__",
    "absent",
    "batched",
    "bind",
    "cluster_named",
    "one_for_one",
    "plan",
]

_MODULES = {
    "actor": "Actor Context Emit NamedVoice Outputs Stream batched",
    "config": "RuntimeConfig ServerConfig",
    "errors": "ActorBrokenError CancelledError ConfigError ContextLengthError DeadlineError DeviceError "
    "EdgeFullError GraphError InvalidInputError NotFoundError OmniflowError OverloadedError PlanError "
    "ProtocolError RecordingError RequestError StageDiedError StageError StartError UnavailableError "
    "UnsupportedError WeightsError",
    "graph": "Graph",
    "media": "AudioChunk AudioFeatures AudioPart Chat ChatMessage Generated HiddenStates ImageFeatures ImagePart "
    "Images Latents Options Part Picture Prompt PromptMessage Segment TextDelta TextLogprob TextPart TokenLogprob "
    "TokenPrompt Tokens Tool ToolCall ToolCallDelta Transcript VideoPart VoiceCode VoiceSample Waveforms Word",
    "planner": "Cluster Gpu Plan cluster_named plan",
    "reply": "Output Reply",
    "runtime": "Runtime",
    "topology": "CHECKPOINT Budget Checkpoint GraphSpec Restart Stage absent bind one_for_one",
}
_HOME = {name: f"omniflow.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'omniflow' has no attribute {name!r}")
    value = globals()[name] = vars(importlib.import_module(_HOME[name]))[name]
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
