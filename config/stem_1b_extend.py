# The third stage after stem_1b.py and stem_1b_midtrain.py: windows of 32k tokens, in which documents do not see each
# other. What it takes: train.py config/stem_1b.py config/stem_1b_extend.py --init_from=scratch --dry_run=True
out_dir = "out/stem_1b_extend"
init_from = "out/stem_1b_midtrain/best.pt"
dataset = "extend"  # long documents: python data/openwebtext/prepare.py --input=FILE --folder=data/extend
doc_mask = True  # 1 GiB a sequence

block_size = 32768
rope_base = 8000000.0  # 16 times what it was, as the length
batch_size = 1
gradient_accumulation_steps = 16  # 524,288 tokens a step, as before

learning_rate = 4e-5  # restarted, with a warm-up: positions are new
min_lr = 4e-6
warmup_iters = 100
max_iters = 1000  # 0.5 B tokens
eval_interval = 250
log_interval = 10
