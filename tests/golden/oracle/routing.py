"""How far a router is from choosing other experts.

Top-k is discontinuous: where two experts tie to rounding, two right implementations differ by whole logits. Goldens
are therefore only made of prompts where every choice is clear.
"""

import torch


def _gap(scores, k):
    if k >= scores.shape[-1]:
        return torch.inf
    top = scores.topk(k + 1, dim=-1).values
    return (top[..., k - 1] - top[..., k]).min().item()


def margin(router_logits, cfg, bias=None):
    """Smallest distance, over all rows of [tokens, experts] logits, between the last score taken and the first not."""
    k = cfg["num_experts_per_tok"]
    groups = cfg.get("n_group") or 1
    if bias is None:  # softmax (V2, Qwen3-MoE): a group's score is its best expert
        scores = router_logits.float().softmax(-1)
        grouped = scores.unflatten(-1, (groups, -1))
        group_scores = grouped.max(-1).values
    else:  # sigmoid with a correction bias (V3, Kimi-K2): a group's score is the sum of its two best
        scores = router_logits.float().sigmoid() + bias
        grouped = scores.unflatten(-1, (groups, -1))
        group_scores = grouped.topk(2, -1).values.sum(-1)
    result = torch.inf
    if groups > 1 and cfg.get("topk_method") != "greedy":
        result = _gap(group_scores, cfg["topk_group"])
        kept = group_scores.topk(cfg["topk_group"], -1).indices
        mask = torch.zeros_like(group_scores).scatter_(1, kept, 1).bool()
        scores = grouped.masked_fill(~mask[..., None], -torch.inf).flatten(-2)
        # The published code fills the other groups with 0, transformers with -inf: equal while chosen scores are > 0.
        result = min(result, scores.topk(k, -1).values.min().item())
    return min(result, _gap(scores, k))
