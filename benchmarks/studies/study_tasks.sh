#!/usr/bin/env bash
# How the task of docs/results/study.md was chosen: the scores of untrained SmolLM2-135M-Instruct in candidates of
# reasoning-gym with short answers, 8 answers to each of 48 questions at temperature 1.
#
#   bash benchmarks/studies/study_tasks.sh
#
# About five minutes on two cores; resumes after an interruption. The table goes to docs/results/study/tasks.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/scripts/setup_env.sh
source examples/scripts/setup_env.sh
model=.cache/quickstart/smollm2-135m-instruct
results=docs/results/study/tasks
data=runs/study_tasks/data
python3 -m openrlhf_gtpo.cli.prepare smollm2 --output "$model"

sets=()
# candidate NAME TASK CONFIG QUESTION_FORM EXAMPLE_QUESTION EXAMPLE_ANSWER
candidate() {
    python3 -m openrlhf_gtpo.cli.prepare task --task "$2" --task-config "$3" --system "Answer briefly." \
        --question-form "$4" --example "$5" "$6" --train-size 1 --eval-size 48 --output "$data/$1" >/dev/null
    cp "$data/$1/eval.jsonl" "$data/$1.jsonl"
    sets+=("$data/$1.jsonl")
}
candidate products_1to2 products '{"min_digits": 1, "max_digits": 2}' '{expression}' '2 * 13' 'The result is 26.'
candidate sum_2x1 chain_sum '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}' '{expression}' '2 + 13' 'The result is 15.'
candidate sum_2x1to2 chain_sum '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}' '{expression}' '21 + 3' 'The result is 24.'
candidate sum_2x2 chain_sum '{"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}' '{expression}' '21 + 13' 'The result is 34.'
candidate sum_3x1 chain_sum '{"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}' '{expression}' '2 + 3 - 1' 'The result is 4.'
candidate sum_3x2 chain_sum '{"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 2}' '{expression}' '12 + 3 - 1' 'The result is 14.'
candidate arithmetic_2to3 basic_arithmetic '{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}' '{expression}' '2 * 3 - 1' 'The result is 5.'
candidate lcm lcm '{"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 15}' 'Least common multiple of {numbers}' 'Least common multiple of [4, 6]' 'The result is 12.'
candidate legs leg_counting '{"min_animals": 2, "max_animals": 2, "min_instances": 1, "max_instances": 4}' 'Legs of {animals}' "Legs of {'cow': 2, 'bird': 1}" 'The result is 10.'
candidate equations simple_equations '{"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}' 'Solve {equation} for {variable}' 'Solve 2*x + 1 = 7 for x' 'The result is 3.'
candidate sequence number_sequence '{"max_complexity": 1, "min_value": -20, "max_value": 20}' '{question}' '2, 4, 6, 8, ?' 'The result is 10.'
candidate backward spell_backward '{"min_word_len": 3, "max_word_len": 4}' '{word}' 'tap' 'pat'
candidate bits count_bits '{"max_n": 64}' 'How many ones are in {binary}?' 'How many ones are in 10110?' 'The result is 3.'

mkdir -p "$results"
python3 -m openrlhf_gtpo.cli.evaluate --model "$model" --eval.dataset "$(IFS=, && echo "${sets[*]}")" \
    --eval.split train --eval.n_samples_per_prompt 8 --rollout.max_new_tokens 24 --data.max_len 512 --data.apply_chat_template \
    --data.label_key scorer_label --reward.remote_url openrlhf_gtpo/tasks/reasoning_gym_reward.py --output runs/study_tasks/evaluation
cp runs/study_tasks/evaluation/{table.md,summary.json} "$results"
