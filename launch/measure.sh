#!/usr/bin/env bash
# Usage: [KNOB=VALUE ...] launch/measure.sh [PART [OPTION ...]]
# Measures the figures of docs/notebook/README.md and docs/design/pipelines.md on this machine's GPUs;
# rows, records and logs go to OUT. Without PART all parts run, one after the other, also after a
# part that fails. With PART only that part runs, and its command gets the options.
set -euo pipefail
cd "$(dirname "$0")/.."

GPUS=${GPUS:-1}             # 1: parts of one GPU; more: parts of as many ranks
OUT=${OUT:-runs/measured}
PEERS=${PEERS:-}            # a folder that peers are imported from, if they are not installed
LIMIT=${LIMIT:-0}           # seconds that each part may take, without PART; 0: no limit
JOBS=${JOBS:-8}             # tests at the same time

export PATH="$PWD/.venv/bin:$PATH"
if [[ $GPUS == 1 ]]; then
    parts=(tests capture loss heads fidelity converge seeds train)
else
    parts=(tests ranks pipeline train)
fi
mkdir -p "$OUT"

if [[ $# == 0 ]]; then
    failed=()
    for part in "${parts[@]}"; do
        echo "measure: $part, into $OUT/$part.log" >&2
        GPUS=$GPUS OUT=$OUT PEERS=$PEERS JOBS=$JOBS timeout "$LIMIT" launch/measure.sh "$part" \
            > "$OUT/$part.log" 2>&1 || failed+=("$part")
    done
    [[ ${#failed[@]} == 0 ]] || { echo "measure: failed: ${failed[*]}" >&2; exit 1; }
    exit
fi
part=$1
shift
[[ " ${parts[*]} " == *" $part "* ]] || {
    echo "measure: PART must be one of ${parts[*]} with GPUS=$GPUS, got $part" >&2
    exit 2
}

from_peers=(${PEERS:+--peer-path "$PEERS"})
# Inputs that were captured after these steps of a model's training, V=256000, D=2304.
captured=()
for step in 0 10 100 1000 5000; do
    captured+=(--inputs "$OUT/captured/step-$step.pt")
done
bench() { python3 -m cce_dist bench "$@"; }
# Three processes at the same time; the others wait while one makes token ids and the checkpoint.
converge() {
    local run runs=()
    for ((run = 0; run < 3; run++)); do
        bench converge --megabytes 40 --steps 300 --checkpoint-steps 600 --evaluations 6 \
            --held-out-tokens 32768 --cache "$OUT/converge" --slice $run/3 "$@" &
        runs+=($!)
    done
    for run in "${runs[@]}"; do wait "$run"; done
}
bench_ranks() { torchrun --standalone --nproc-per-node "$GPUS" -m cce_dist bench "$@"; }
on_gpu=(--device cuda --dtype bfloat16)
# A decoder whose head takes 70 % of its products.
decoder=(launch/configs/gpus.yaml --data.megabytes 8 --model.dim 2304 --model.heads 9)
decoder+=(--model.layers 4 --out "$OUT/decoder")

case $GPUS-$part in
1-tests)
    python3 -m pytest -p no:cacheprovider -p no:benchmark -n "$JOBS" --dist worksteal \
        --failures-at-once -m "gpu and not multigpu" "$@"
    ;;
1-capture)
    bench capture --tokens 8192 --batch 4 --step 0 --step 10 --step 100 --step 1000 --step 5000 \
        --out "$OUT/captured" "$@"
    ;;
1-loss)
    bench loss "${on_gpu[@]}" --inputs "$OUT/captured/step-1000.pt" --inputs zipf \
        --shape gemma2-2b --shape llama3-8b --passes loss --passes forward --passes loss+grad \
        --method dense --method filtered --method exact --method exact-kept --method in_forward \
        --method screened --method screened-e4m3 --method screened-copy --peers torch-compile,flash-attn,liger-8,cce,cce-exact \
        "${from_peers[@]}" --budget-seconds 1 --csv "$OUT/loss.csv" "$@"
    ;;
1-heads)
    bench heads "${from_peers[@]}" --csv "$OUT/heads.csv" --cache "$OUT/heads" "$@"
    ;;
1-fidelity)
    bench fidelity "${captured[@]}" --device cuda "${from_peers[@]}" --repeats 5 \
        --record "$OUT/fidelity.json" "$@"
    ;;
1-converge)
    converge "${from_peers[@]}" --record "$OUT/convergence.json" "$@"
    ;;
1-seeds)
    converge --start random --seeds 9 --method dense --method exact --method in_forward \
        --method filtered --method screened --record "$OUT/convergence-seeds.json" "$@"
    ;;
1-train)
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    bench train "${decoder[@]}" --parallel.tp 1 --parallel.sequence_parallel false --batch 16 \
        --warmup-steps 40 --timed-steps 6 --loss cce --loss dense --loss torch-compile \
        --loss liger --loss apple-cce "${from_peers[@]}" --csv "$OUT/train.csv" \
        --record "$OUT/end-to-end.json" "$@"
    bench train "${decoder[@]}" --parallel.tp 1 --parallel.sequence_parallel false --batch 16 \
        --loss.logits screened --warmup-steps 40 --timed-steps 6 --loss cce \
        --csv "$OUT/train-screened.csv" --record "$OUT/end-to-end-screened.json" "$@"
    ;;
*-tests)
    python3 -m pytest -p no:cacheprovider -p no:benchmark --failures-at-once -m multigpu "$@"
    ;;
*-ranks)
    bench_ranks ranks --inputs zipf --shape gemma2-2b --shape llama3-8b --method filtered \
        --method screened --method exact --method in_forward --method dense \
        --peers all "${from_peers[@]}" --repeats 8 --csv "$OUT/ranks.csv" "$@"
    ;;
*-pipeline)
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    bench_ranks pipeline --csv "$OUT/pipeline.csv" "$@"
    ;;
*-train)
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    bench_ranks train "${decoder[@]}" --parallel.tp "$GPUS" --batch 32 --warmup-steps 12 \
        --timed-steps 6 --csv "$OUT/train-tp.csv" --record "$OUT/end-to-end-tp.json" "$@"
    # A peer needs the whole head on every rank, and so a whole model.
    bench_ranks train "${decoder[@]}" --parallel.tp 1 --parallel.sequence_parallel false \
        --batch 16 --warmup-steps 12 --timed-steps 6 --loss cce --loss dense \
        --loss liger --loss apple-cce "${from_peers[@]}" --csv "$OUT/train-dp.csv" \
        --record "$OUT/end-to-end-dp.json" "$@"
    ;;
esac
