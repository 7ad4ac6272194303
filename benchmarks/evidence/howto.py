"""The report's last section: the commands that make each kind of evidence."""

from __future__ import annotations

from benchmarks.evidence.page import Block, Points, Words

HOW_TO: tuple[Block, ...] = (
    Words(
        "Each command writes a record, a JSON file in docs/evidence with its command, machine, "
        "commit, seeds, settings and rows; `cce-dist report` makes this page of them, with the "
        "figures, and `--html PAGE` one file for a browser. RECORD is a file to write in "
        "docs/evidence, PEERS a folder with the sources of peers that are not installed."
    ),
    Points(
        (
            "**convergence**: `cce-dist bench converge --peer-path PEERS`, on one GPU. Runs are "
            "appended one by one, and the same command goes on where it was ended; "
            "`--budget-seconds 540` ends it between two runs. On several GPUs: `for k in 0 1 2 3; "
            "do CUDA_VISIBLE_DEVICES=$k cce-dist bench converge --slice $k/4 & done; wait`. "
            "`--prepare` makes the token ids alone, which takes minutes of a CPU and no GPU; "
            "`--vocab`, `--start`, `--method` and `--seeds` choose among the runs. A small "
            "vocabulary keeps so much by default that no logit is screened; `--keep 2^-6.5 "
            "--max-kept 1` is for V=16384.",
            "**fidelity** and **probabilities**: `cce-dist bench capture --step 0 --step 10 "
            "--step 100 --step 1000 --step 5000`, then `cce-dist bench fidelity --inputs FILE ... "
            "--device cuda --peer-path PEERS --record RECORD` and `cce-dist bench probabilities "
            "--inputs FILE ... --device cuda --record RECORD`, an `--inputs` for each file.",
            "**classes**: `python docs/examples/instance_classes.py RECORD`.",
            "**end-to-end**: `PYTORCH_ALLOC_CONF=expandable_segments:True cce-dist bench train "
            "launch/configs/gpus.yaml --data.megabytes 8 --model.dim 2304 --model.heads 9 "
            "--model.layers 4 --parallel.tp 1 --parallel.sequence_parallel false --batch 16 "
            "--warmup-steps 40 --timed-steps 6 --loss cce --loss dense --loss torch-compile "
            "--loss liger --loss apple-cce --peer-path PEERS --record RECORD`, on one GPU; on four "
            "`torchrun --nproc-per-node 4 -m cce_dist bench train launch/configs/gpus.yaml "
            "--parallel.tp 4 --record RECORD`; peers, which hold all of the head, with "
            "`--parallel.tp 1`, data-parallel.",
            "Most of it at once: `launch/measure.sh`, and with `GPUS=4` what takes four. Records "
            "that more seeds, sizes or options made say so in their command.",
        )
    ),
)
