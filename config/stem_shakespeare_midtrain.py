# The second stage after stem_shakespeare.py: other text, Python's own manual, made ready as the README says. Shape,
# weights and the moments of rows are the checkpoint's; those of dense weights start anew, hence a warm-up.
out_dir = "out/stem_shakespeare_midtrain"
init_from = "out/stem_shakespeare/best.pt"
dataset = "topics"

batch_size = 8  # and block_size 64, the checkpoint's: 512 tokens a step

learning_rate = 1e-3  # restarted, since stem_shakespeare.py ends at 0
max_iters = 200
warmup_iters = 20
eval_interval = 100
eval_iters = 20
log_interval = 50
