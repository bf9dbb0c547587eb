"""
What there is to see of a model: what it says next, before and after a change, and what the rows of its tables are like.
For edit.py, which does the changing: python edit.py --prompt=.. or --inspect=..
"""

import torch
import torch.nn.functional as F


def pieces(tokenizer, ids):
    """Tokens in quotes: in byte pairs ' Spain' is not 'Spain'."""
    return " + ".join(repr(tokenizer.decode([i])) for i in ids) or "nothing"


def look(model, tables, tokenizer, ids, max_new_tokens):
    """What comes after ids: log-probabilities of the next token, (V,), and the likeliest text."""
    x, new = torch.tensor([ids]), []
    plan, device = tables.plan(x), model.wte.weight.device
    with torch.no_grad():
        logits = model(x.to(device), tables.fetch(plan), plan.inv.to(device))[0, -1, : tokenizer.vocab_size].cpu()
    for token in model.generate(tables, x, max_new_tokens, 0, 0, tokenizer.end_id, tokenizer.vocab_size):
        new.append(token.item())
    return logits.log_softmax(dim=0), tokenizer.decode(ids + new)


def compare(tokenizer, before, after):
    """Print what look() saw, side by side."""
    columns = [[f"{pieces(tokenizer, [i])[:18]:18} {'█' * round(12 * p):12} {p:6.1%}"
                for p, i in zip(*(x.tolist() for x in log_p.exp().topk(min(5, len(log_p)))))]
               for log_p, _ in (before, after)]
    print(*(f"{b}   {a}" for b, a in zip([f"{'before':38}", *columns[0]], ["after", *columns[1]])), sep="\n")
    kl = F.kl_div(after[0], before[0], reduction="sum", log_target=True).clamp_min(0)
    print(f"KL(before, after) {kl:.3f} nats\n"
          f"before: {before[1]}\nafter:  {after[1]}")


def spread(label, rows):
    """Print how the cosines of all pairs of rows, (N, M), are distributed."""
    rows = F.normalize(rows)
    cos = (rows @ rows.T)[torch.ones(len(rows), len(rows)).triu(1) > 0].clamp(-1, 1)
    share = cos.histc(40, -1, 1) / cos.histc(40, -1, 1).max()
    graph = "".join(" ▁▂▃▄▅▆▇█"[i] for i in (8 * share).ceil().int().tolist())
    print(f"{label:26} {cos.abs().quantile(0.95):.3f}  |{graph}|")


@torch.no_grad()
def inspect_rows(model, tables, tokenizer, ids, dense=None, seed=1):
    """Print the nearest rows, norms and updates of ids, and how a table's rows spread; dense: a model to compare.

    seed: of the rows that are drawn where there are many. ValueError for tables that are as they started.
    """
    weight, count = (tables.state_dict()[name] for name in ("weight", "count"))
    met = count.nonzero()[:, 0]
    if len(met) < 2:
        raise ValueError("the rows of this checkpoint have not been trained")
    for i in ids:
        print(f"{pieces(tokenizer, [i])}, {count[i]:,} updates")
        for s, layer in enumerate(model.config.stem_layers):
            row, others = weight[i, s].cpu(), weight[met[met != i], s].cpu()
            near = zip(*(x.tolist() for x in F.cosine_similarity(others, row[None]).topk(min(5, len(others)))))
            names = ", ".join(f"{pieces(tokenizer, [met[met != i][j].item()])} {cos:.2f}" for cos, j in near)
            print(f"  layer {layer}: norm {row.norm():.2f} (mean {others.norm(dim=1).mean():.2f}); nearest {names}")
    some = met[torch.randperm(len(met), generator=torch.Generator().manual_seed(seed))[:2000]]  # 2 M pairs
    print(f"{f'cosines of {len(some):,} rows':26} P95 of |cos|, and from -1 to 1; the paper has 0.026 to 0.033")
    for s, layer in enumerate(model.config.stem_layers):
        spread(f"  table of layer {layer}", weight[some, s].cpu())
    spread("  random rows", torch.randn(len(some), model.config.d_ff))
    for layer in model.config.stem_layers if dense else ():
        ups, up = [], dense.blocks[layer].ffn.w_up
        with up.register_forward_hook(lambda module, x, y, ups=ups: ups.append(y[:, 0].float().cpu())):
            x = some[:, None].to(dense.wte.weight.device)  # each token alone: W_u x depends on what was before
            dense(x, x.new_empty(len(x), 0, 0), x)
        spread(f"  W_u x of dense layer {layer}", ups[0])
