"""
A checkpoint under lm-evaluation-harness (pip install lm_eval). Its public tasks want a network and GPT-2's byte pairs.

    python harness.py --out_dir=out/stem_openwebtext --tasks=arc_easy,arc_challenge,openbookqa,hellaswag
    python harness.py --out_dir=out/stem_small --tasks=facts --include_path=FOLDER    # tasks of your own
"""

import torch

import checkpoint
from configurator import configure
from device import choose_device

# ---------------------------------------------------------------------------------------------------------------------
out_dir = "out/stem_small"  # of a run (its best.pt, else ckpt.pt), or the path of a checkpoint
tasks = ""  # names, with commas
include_path = ""  # folder of tasks to choose from, as .yaml; empty = the harness's own
limit = 0  # questions of each task, 0 = all
batch_size = 8  # windows at once
device = "auto"  # auto (cuda, else mps, else cpu), or a torch device such as cpu or cuda:1


class Scorer:
    """The three things that the harness asks of a model, scoring in batches, continuing texts one by one."""

    def __init__(self, model, tables, tokenizer, batch_size=8):
        super().__init__()
        self.model, self.tables, self.tokenizer, self.batch_size = model, tables, tokenizer, batch_size
        self.start = [tokenizer.end_id] if tokenizer.end_id is not None else tokenizer.encode("\n")  # comes first

    @torch.no_grad()
    def score(self, texts):  # [(ids, n)] -> [(log-probability of the last n ids, whether each is the likeliest)]
        T, windows, result = self.model.config.block_size, [], [(0.0, True)] * len(texts)
        for i, (ids, n) in enumerate(texts):  # each of the n once, the last ones with all the context that fits
            for begin in range(len(ids) - n, len(ids), T):
                windows.append((ids[max(0, min(begin, len(ids) - T) - 1) : begin + T], min(T, len(ids) - begin), i))
        windows.sort(key=lambda window: len(window[0]))
        for batch in (windows[k : k + self.batch_size] for k in range(0, len(windows), self.batch_size)):
            x = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids[:-1]) for ids, _, _ in batch], True)  # at the right,
            plan, at = self.tables.plan(x), self.model.wte.weight.device  # where causal attention does not look
            for h, (ids, n, i) in zip(self.model.hidden(x.to(at), self.tables.fetch(plan), plan.inv.to(at)), batch):
                logits = self.model.lm_head(h[len(ids) - 1 - n : len(ids) - 1]).float().cpu()  # (T, C) -> (n, V)
                total = result[i][0] + logits.log_softmax(-1)[range(n), ids[-n:]].sum().item()
                result[i] = total, result[i][1] and logits.argmax(-1).tolist() == ids[-n:]
        return result

    def loglikelihood(self, requests):
        """(context, continuation) -> (log-probability of the continuation behind the context, whether it is greedy)."""
        texts = []
        for context, continuation in (request.args for request in requests):
            before, ids = (self.tokenizer.encode(text) for text in (context.rstrip(), context + continuation))
            texts.append((ids if before else self.start + ids, len(ids) - len(before)))  # spaces go with what follows
        return self.score(texts)

    def loglikelihood_rolling(self, requests):
        """(text,) -> the log-probability of all of it."""
        texts = [self.tokenizer.encode(*request.args) for request in requests]
        return [total for total, _ in self.score([(self.start + ids, len(ids)) for ids in texts])]

    def generate_until(self, requests):
        """(context, {until, max_gen_toks, do_sample, temperature}) -> what follows, less a stop and all behind it."""
        texts = []
        for context, how in (request.args for request in requests):
            ids, text, cut, stops = [], "", [], how.get("until") or []
            for token in self.model.generate(self.tables, torch.tensor([self.tokenizer.encode(context) or self.start]),
                                             how.get("max_gen_toks", 256), vocab_size=self.tokenizer.vocab_size,
                                             temperature=how.get("temperature", 1.0) if how.get("do_sample") else 0):
                if token.item() == self.tokenizer.end_id:
                    break
                ids += token.tolist()
                text = self.tokenizer.decode(ids)
                if cut := [text.index(s) for s in ([stops] if isinstance(stops, str) else stops) if s in text]:
                    break
            texts.append(text[: min(cut, default=None)])
        return texts


if __name__ == "__main__":
    configure(globals(), minimum={"batch_size": 1})
    try:
        import lm_eval.evaluator
    except ImportError:
        raise SystemExit("this needs a package that is not here: pip install lm_eval") from None
    manager = lm_eval.tasks.TaskManager(include_path=include_path or None, include_defaults=not include_path)
    if unknown := set(tasks.split(",")) - set(manager.all_tasks):
        raise SystemExit(f"--tasks={tasks}: there is no {sorted(unknown)} in {include_path or 'the harness'}")
    model = checkpoint.rebuild(checkpoint.load(out_dir), *choose_device(device, "auto"))
    model = type("Model", (Scorer, lm_eval.api.model.LM), {})(*model, batch_size)
    result = lm_eval.evaluator.simple_evaluate(model, tasks=tasks.split(","), task_manager=manager, limit=limit or None)
    print(lm_eval.utils.make_table(result))
