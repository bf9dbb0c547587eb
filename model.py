"""
A Llama-style GPT whose feed-forward layers may be STEM layers: RMSNorm before each part, rotary positions, causal
attention (grouped-query if n_kv_head < n_head), no biases. The model of "Scaling Transformers with Embedding Modules",
arXiv 2601.10639; a dense model is the same code with stem_every = 0.

The model does not own the tables. It takes the rows of its batch and an index into them, model(ids, rows, inv), and
never learns whether they came from its own device, from host memory or from another process:

    model, tables = GPT(config), StemTables(*config.table_shape, config.table_std)
    plan = tables.plan(ids)
    loss = model(ids, tables.fetch(plan), plan.inv, targets)

It does not load checkpoints (checkpoint.py) or know any tokenizer.

Shapes: B batch, T time, C n_embd, M d_ff, V vocab_size, S STEM layers, U distinct ids of a step, H heads, D head size.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from stem import STEM_VARIANTS, HashMoE, Linear, SwiGLU, is_stem_layer


@dataclass
class GPTConfig:
    """The shape of a model; train.py's settings hold the defaults. ValueError, with what to change, if it cannot be."""

    block_size: int  # context length T, tokens
    vocab_size: int  # V, rows of a table
    n_layer: int
    n_head: int
    n_kv_head: int  # key and value heads, each shared by n_head / n_kv_head query heads; 0 = n_head
    n_embd: int  # C
    d_ff: int  # M; 0 = 8/3 n_embd, rounded up to a multiple of 32
    dropout: float  # of the token embedding and of what attention and feed-forward add
    wte_dropout: float  # share of positions whose token embedding is zeroed in training; their table rows stay
    rope_base: float
    tie_head: bool  # the output head is the token embedding
    stem_every: int  # 0 = dense, 3 = a third of the layers, 2 = half, 1 = all
    stem_first: int  # first layer that may be STEM
    stem_variant: str  # what U[t] replaces: up (STEM), gate, add (to W_u x, replacing nothing), hybrid; hash: Hash-MoE
    doc_id: int = -1  # of what starts a document, whose tokens attend to each other alone; -1 = to all, as of old

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        self.d_ff = self.d_ff or math.ceil(8 / 3 * self.n_embd / 32) * 32  # three matmuls cost what GPT-2's two 4C did
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "wte_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.n_embd % (2 * self.n_head):  # rotary positions turn pairs of numbers
            raise ValueError(f"n_embd {self.n_embd} must be a multiple of 2 n_head = {2 * self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}")
        if self.stem_variant not in STEM_VARIANTS:
            raise ValueError(f"stem_variant must be one of {', '.join(STEM_VARIANTS)}, got {self.stem_variant!r}")
        if self.stem_every and not self.varied_layers:
            raise ValueError(f"stem_every {self.stem_every} and stem_first {self.stem_first} leave no STEM layer among "
                             f"{self.n_layer}; a dense model is stem_every = 0")

    @property
    def varied_layers(self):
        """The layers whose feed-forward part is stem_variant's, ascending."""
        return [i for i in range(self.n_layer) if is_stem_layer(i, self.stem_every, self.stem_first)]

    @property
    def stem_layers(self):
        """Those of them that read a table: all, but none of Hash-MoE, which routes by token; S = len."""
        return self.varied_layers if self.stem_variant != "hash" else []

    @property
    def table_shape(self):
        """(V, S, M) of the tables of all STEM layers."""
        return self.vocab_size, len(self.stem_layers), self.d_ff

    @property
    def table_std(self):
        """Scale of the initial rows: that of W_u x for a normed x and W_u of std 0.02: STEM starts like dense."""
        return 0.02 * math.sqrt(self.n_embd)


# ---------------------------------------------------------------------------------------------------------------------
# Leaves.


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in x's dtype."""

    def __init__(self, C):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-5)


def rotary_table(config):
    """cos and signed sin of position times frequency, (2, block_size, D). Su et al. 2021, arXiv 2104.09864."""
    D = config.n_embd // config.n_head
    frequency = config.rope_base ** (-torch.arange(0, D, 2) / D)
    angle = torch.outer(torch.arange(config.block_size), frequency)  # (T, D / 2)
    return torch.stack((torch.cat((angle.cos(), angle.cos()), dim=1), torch.cat((-angle.sin(), angle.sin()), dim=1)))


def rotate(x, cos_sin):  # (B, T, H, D), (2, T, D) -> (B, T, H, D)
    """Turn the pair (x[i], x[i + D/2]) by its position's angle: the dot of two heads then depends on their distance."""
    cos, sin = cos_sin[:, :, None]
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin).to(x.dtype)  # the angles stay fp32


class KVCache:
    """Keys and values of the tokens seen so far, for generation; allocated in whatever dtype attention computes in."""

    def __init__(self, block_size):
        self.block_size, self.length, self.layers, self.ids = block_size, 0, {}, None

    def append(self, layer, k, v):  # (B, H_kv, T, D) -> (B, H_kv, length + T, D), twice
        if layer not in self.layers:
            B, H, _, D = k.shape
            self.layers[layer] = k.new_empty(2, B, H, self.block_size, D)
        end = self.length + k.size(2)
        kv = self.layers[layer]
        kv[0, :, :, self.length : end] = k
        kv[1, :, :, self.length : end] = v
        return kv[0, :, :, :end], kv[1, :, :, :end]

    def with_past(self, ids):  # (B, T) -> (B, length + T)
        """The ids of what the cache holds and these, which it keeps: they say where its documents are."""
        self.ids = torch.cat((self.ids, ids), dim=1) if self.length else ids
        return self.ids


# ---------------------------------------------------------------------------------------------------------------------
# The model.


class Attention(nn.Module):
    """Causal self-attention; with fewer key and value heads than heads, each serves several (grouped-query)."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.D = layer, config.n_embd // config.n_head
        self.heads = (config.n_head, config.n_kv_head)
        self.w_qkv = Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * self.D)
        self.w_out = Linear(config.n_embd, config.n_embd)

    def forward(self, h, cos_sin, mask, cache):  # (B, T, C), (2, T, D), (.., T, length + T) or None -> (B, T, C)
        B, T, C = h.shape
        H, H_kv = self.heads
        qk, v = self.w_qkv(h).view(B, T, -1, self.D).split((H + H_kv, H_kv), dim=2)
        q, k = rotate(qk, cos_sin).split((H, H_kv), dim=2)  # before the transpose, as memory lies
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1,
                                           enable_gqa=H != H_kv)
        return self.w_out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention, then a feed-forward layer that is dense or STEM, each normed before and added to the stream."""

    def __init__(self, config, layer):
        super().__init__()
        self.is_stem = layer in config.stem_layers
        FFN = STEM_VARIANTS[config.stem_variant] if layer in config.varied_layers else SwiGLU
        self.attn_norm = RMSNorm(config.n_embd)
        self.attn = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.n_embd)
        self.ffn = FFN(config.n_embd, config.d_ff)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h, u, ids, cos_sin, mask, cache):  # (B, T, C), (B, T, M) or None -> (B, T, C)
        h = h + self.dropout(self.attn(self.attn_norm(h), cos_sin, mask, cache))
        return h + self.dropout(self.ffn(self.ffn_norm(h), u, ids))


class GPT(nn.Module):
    """The transformer without its tables. dtype is what activations and matmuls run in; parameters stay fp32."""

    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        if config.tie_head:
            self.lm_head.weight = self.wte.weight
        self.register_buffer("cos_sin", rotary_table(config), persistent=False)
        self.init_weights()

    def init_weights(self):
        """GPT-2's: normal, std 0.02; smaller for what writes into the residual stream, where 2 n_layer terms add up."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("w_out.weight", "w_down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02)

    def hidden(self, ids, rows, inv, cache=None):
        """The normed hidden state behind the last layer, (B, T, C). Arguments as in forward."""
        T, start = ids.size(1), 0 if cache is None else cache.length
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit into block_size {self.config.block_size}; crop them")
        mask, doc_id = None, self.config.doc_id  # one new token sees all, tokens without a past have the causal kernel
        if start and T > 1 or doc_id >= 0:
            position = torch.arange(start + T, device=ids.device)
            mask = position <= position[start:, None]
        if doc_id >= 0:
            document = ((ids if cache is None else cache.with_past(ids)) == doc_id).cumsum(1)  # 0 began before
            mask = mask & (document[:, None, start:, None] == document[:, None, None])  # (B, 1, T, length + T)
        h = self.wte(ids).to(self.dtype)  # (B, T, C)
        if self.training and self.config.wte_dropout:
            h = h * (torch.rand(h.shape[:2], device=h.device) >= self.config.wte_dropout)[..., None]
        h = self.dropout(h)
        tables = iter(rows.unbind(1))  # S times (U, M); unbind, since the backward of rows[:, l] costs O(S^2)
        for block in self.blocks:
            # the cast comes after the lookup: gradients of a token's many occurrences sum in fp32
            u = F.embedding(inv, next(tables)).to(h.dtype) if block.is_stem else None  # (B, T, M)
            h = block(h, u, ids, self.cos_sin[:, start : start + T], mask, cache)
        if cache is not None:
            cache.length += T
        return self.norm(h)

    def forward(self, ids, rows, inv, targets=None, cache=None):
        """Logits (B, T, V) fp32, or with targets (B, T) the mean cross-entropy, in nats per token.

        ids (B, T) int64. rows (U, S, M) and inv (B, T): what tables.fetch and tables.plan made of ids. cache: a KVCache
        that holds the keys and values of the tokens before ids, and gets those of ids.
        """
        logits = self.lm_head(self.hidden(ids, rows, inv, cache)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    # -----------------------------------------------------------------------------------------------------------------
    # Accounting.

    def parameters_by_role(self):
        """Numbers stored, by role; "tables" are those of StemTables. The rest sums to what the model holds."""
        modules = {"embedding": [self.wte], "head": [] if self.config.tie_head else [self.lm_head],
                   "attention": [b.attn for b in self.blocks], "feed-forward": [b.ffn for b in self.blocks],
                   "norms": [m for m in self.modules() if isinstance(m, RMSNorm)]}
        count = {role: sum(p.numel() for m in ms for p in m.parameters()) for role, ms in modules.items()}
        assert sum(count.values()) == sum(p.numel() for p in self.parameters()), f"a role is missing in {count}"
        return count | {"tables": math.prod(self.config.table_shape)}

    def idle_parameters(self):
        """Of each Hash-MoE all experts but the one that a token goes to; elsewhere none."""
        experts = [f for m in self.modules() if isinstance(m, HashMoE) for f in m.experts[1:]]
        return sum(p.numel() for f in experts for p in f.parameters())

    def active_parameters(self):
        """The paper's: all but tables and idle experts, input embedding included. Its GFLOPs a token are twice that."""
        return sum(p.numel() for p in self.parameters()) - self.idle_parameters()

    def flops_per_token(self):
        """FLOPs to train on one token, forward and backward: matmuls and attention. A table row costs none.

        6 per matmul weight (2 forward, 4 backward), and attention's 2 T C multiply-adds a layer as in PaLM's appendix
        B, which counts the masked half too.
        """
        matmuls = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))
        attention = self.config.n_layer * 2 * self.config.block_size * self.config.n_embd
        return 6 * (matmuls - self.idle_parameters() + attention)

    # -----------------------------------------------------------------------------------------------------------------

    def configure_optimizer(self, learning_rate, weight_decay, betas):
        """AdamW over the dense parameters: matrices decay, norms do not. The tables have stem.adamw_rows."""
        parameters = list(self.parameters())
        matrices, norms = ([p for p in parameters if p.dim() == dim] for dim in (2, 1))
        assert len(matrices) + len(norms) == len(parameters), "a parameter is neither a matrix nor a norm"
        groups = [{"name": "matrices", "params": matrices, "weight_decay": weight_decay},
                  {"name": "norms", "params": norms, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    @torch.no_grad()
    def generate(self, tables, ids, max_new_tokens, temperature=1.0, top_k=0, stop_id=None, vocab_size=None,
                 use_cache=True):
        """Continue ids (B, T) int64 on the CPU; yields the next ids (B,) on the CPU, max_new_tokens times.

        temperature 0 is greedy. top_k: sample from that many likeliest tokens, 0 = all. vocab_size: sample below that
        id only, for a model padded beyond its tokenizer. stop_id: a sequence that has emitted it goes on emitting it,
        and generation ends when all have. A full context keeps its last half and is read again, with or without the
        cache: that way both give the same text.
        """
        device = self.wte.weight.device
        context = new = ids[:, -self.config.block_size :]
        cache = KVCache(self.config.block_size)
        done = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(max_new_tokens):
            plan = tables.plan(new)
            h = self.hidden(new.to(device), tables.fetch(plan), plan.inv.to(device), cache if use_cache else None)
            logits = self.lm_head(h[:, -1]).float().cpu()[:, :vocab_size]  # the id decides the next rows, on the CPU
            if logits.isnan().any():
                raise ValueError("the model's logits are nan, so are weights or rows: take an earlier checkpoint")
            k = 1 if temperature == 0 else top_k
            if 0 < k < logits.size(-1):
                values, kept = logits.topk(k)  # the k themselves: a threshold would let ties in
                logits = torch.full_like(logits, -torch.inf).scatter(1, kept, values)
            logits = (logits - logits.max(dim=-1, keepdim=True).values) / (temperature or 1.0)
            token = torch.multinomial(logits.softmax(dim=-1), 1)[:, 0]
            if stop_id is not None:
                token = torch.where(done, stop_id, token)
                done |= token == stop_id
            yield token
            if done.all():
                return
            context = torch.cat((context, token[:, None]), dim=1)
            if context.size(1) > self.config.block_size:
                context = new = context[:, -max(1, self.config.block_size // 2) :]
                cache = KVCache(self.config.block_size)
            else:
                new = token[:, None] if use_cache else context


# ---------------------------------------------------------------------------------------------------------------------


def print_accounting(config, batch_size, gradient_accumulation_steps, world=1, cache_rows=0):
    """What a model stores, does for a token and each of `world` processes needs in training; builds no weights."""
    with torch.device("meta"):  # shapes without memory
        model, twin = GPT(config), GPT(replace(config, stem_every=0))
    role, active, full = model.parameters_by_role(), model.active_parameters(), twin.active_parameters()
    flops, tokens = model.flops_per_token(), batch_size * config.block_size
    rows = min(config.vocab_size, tokens * gradient_accumulation_steps // world) * math.prod(config.table_shape[1:])
    tables, hot = role["tables"] / world, cache_rows * math.prod(config.table_shape[1:])
    resident, offloaded = 12 * (tables + rows), 12 * hot + 20 * rows  # with Adam; a step's rows, gradients; two lanes
    # numbers that a token keeps for the backward pass: by layer, and its logits, their softmax and gradient
    kept = config.n_layer * (8 * config.n_embd + 4 * config.d_ff) + 3 * config.vocab_size
    memory = {"weights, gradients, Adam": 16 * active, "activations, about": 4 * tokens * kept,
              "tables and a step's rows": resident, "with --offload=True": offloaded}
    print(f"layers      {config.n_layer}, STEM: {', '.join(map(str, config.stem_layers)) or 'none'}")
    print("parameters  " + ", ".join(f"{name} {n:,}" for name, n in role.items()) + f"; stored {sum(role.values()):,}")
    print(f"active      {active:,} a token, {2e-9 * active:.4g} GFLOPs as the paper counts; dense twin {full:,}, "
          f"{2e-9 * full:.4g}; the paper's total is twin + tables, {full + role['tables']:,}")
    print(f"FLOPs       {flops:,} to train on a token, {flops / twin.flops_per_token():.3f} of the dense twin's")
    print("memory      " + ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in memory.items()))
    if offloaded > 12 * tables:
        print("            a step may use so many rows that with offload, and a cache, they need more of the device "
              "than all tables")
