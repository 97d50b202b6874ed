"""Who speaks: CAM++'s embedding of a voice, from the `campplus.onnx` of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from omniflow.errors import WeightsError

if TYPE_CHECKING:
    import onnxruntime

SAMPLE_RATE_HZ = 16_000
SPEAKER_DIM = 192
"""Of the embedding."""
FILE = "campplus.onnx"
_NUM_MELS = 80


class SpeakerEncoder:
    """Mono samples at 16 kHz to float32 [192]. Raises WeightsError where `file` is no such network."""

    def __init__(self, file: Path, threads: int = 1) -> None:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as failures

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self._session: onnxruntime.InferenceSession = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"]
            )
        except (failures.Fail, failures.InvalidGraph, failures.InvalidProtobuf, failures.NoSuchFile) as error:
            raise WeightsError(f"{file} is not a network that onnxruntime can run: {error}") from error
        self._input = self._session.get_inputs()[0].name

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """See the class; `samples` are at least 25 ms. Raises WeightsError where the network gives something else."""
        (given, *_) = self._session.run(None, {self._input: voice_features(samples)[None]})
        embedding: np.ndarray = np.asarray(given, np.float32).reshape(-1)
        if embedding.shape != (SPEAKER_DIM,) or not np.isfinite(embedding).all():
            raise WeightsError(f"{FILE} gives {embedding.shape} where an embedding [{SPEAKER_DIM}] was expected")
        return embedding


def voice_features(samples: np.ndarray) -> np.ndarray:
    """Kaldi's log-mel filter bank without its mean, as CAM++ was trained on: float32 [n, 80], a frame each 10 ms."""
    import kaldi_native_fbank

    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq = SAMPLE_RATE_HZ
    options.frame_opts.dither = 0
    options.mel_opts.num_bins = _NUM_MELS
    bank = kaldi_native_fbank.OnlineFbank(options)
    bank.accept_waveform(SAMPLE_RATE_HZ, samples)
    bank.input_finished()
    frames = np.stack([bank.get_frame(number) for number in range(bank.num_frames_ready)])
    features: np.ndarray = frames - frames.mean(axis=0)
    return features
