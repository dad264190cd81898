"""Compares vLLM's predictions of a quantized folder with ours. Needs a build of vLLM for CPUs.

Usage: vllm_logits.py IDS TEXT FOLDER    Our logits of IDS are next to the folder as FOLDER-auto.npy. Prints, as JSON,
    run      the median over tokens of the difference's rms, as a share of the logits': ours without their mean, and
             vLLM's, whose logarithms of probabilities are logits except for a constant per token
    worst    the largest over tokens, a router's changes of mind among them
    top1     the share of tokens for which both have the same best one
    answer   what vLLM answers to TEXT, greedily
or {"refused": why}.

Two of vLLM 0.32's own checks are lifted, both of where models may run and not of how weights are read. Its MLA kernels for
CPUs know DeepSeek's sizes alone: such models run by its plain attention (VLLM_MLA_DISABLE). And its int8 and int4 experts
for CPUs, which get the chosen experts and their weights, say that they know softmax routing only.
"""
import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_MLA_DISABLE="1",
                  VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")

import numpy
import vllm
from vllm.model_executor.layers.fused_moe.experts import cpu_moe


def compare(folder, ids, text):
    for experts in (cpu_moe.CPUExpertsInt8, cpu_moe.CPUExpertsInt4):
        experts._supports_routing_method = staticmethod(lambda *_: True)
    model = vllm.LLM(model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=1,
                     max_num_batched_tokens=256, max_logprobs=-1, enable_prefix_caching=False)
    every = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    told = model.generate([{"prompt_token_ids": ids}], every, use_tqdm=False)[0]
    ours = numpy.load(f"{folder}-auto.npy")[:-1]
    theirs = numpy.array([[row[token].logprob for token in range(ours.shape[1])] for row in told.prompt_logprobs[1:]])
    ours, theirs = (x - x.mean(-1, keepdims=True) for x in (ours, theirs))
    shares = numpy.sqrt(((theirs - ours) ** 2).mean(-1) / (ours**2).mean(-1))
    greedy = vllm.SamplingParams(temperature=0, max_tokens=16)
    answer = model.chat([{"role": "user", "content": text}], greedy, use_tqdm=False)
    return {"run": float(numpy.median(shares)), "worst": float(shares.max()),
            "top1": float((ours.argmax(-1) == theirs.argmax(-1)).mean()), "answer": answer[0].outputs[0].text}


if __name__ == "__main__":
    ids, text, folder = sys.argv[1:]
    try:
        result = compare(folder, [int(i) for i in ids.split(",")], text)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # the error is the result
        result = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    print(json.dumps(result))
