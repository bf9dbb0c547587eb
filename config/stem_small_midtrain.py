# The second stage after stem_small.py: another mix, python data/needle/prepare.py first. Shape, weights and the moments
# of rows are the checkpoint's; those of dense weights start anew, hence a warm-up.
out_dir = "out/stem_small_midtrain"
init_from = "out/stem_small/best.pt"
dataset = "needle"  # a quarter facts; the rest can only be read: rivers and lists that are told again

batch_size = 8  # and block_size 64, the checkpoint's: 512 tokens a step

# Restarted, since stem_small.py ends at 0. A continued schedule goes on from the min_lr of the stage before, as in
# stem_1b_midtrain.py. A higher rate learns no more here and forgets more facts.
learning_rate = 2e-4
stem_lr_scale = 10.0
max_iters = 600
warmup_iters = 50
eval_interval = 300
log_interval = 100
