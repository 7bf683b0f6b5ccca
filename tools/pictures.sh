#!/usr/bin/env bash
# The README's pictures, from a run of the demo (Debian: apt-get install chromium fonts-noto-cjk):
#   OMP_NUM_THREADS=1 python demo.py --experiment-name angles
#   tools/pictures.sh runs/angles
set -euo pipefail
run=$(realpath "$1") docs=$(realpath "$(dirname "$0")/../docs") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

picture() {  # NAME HEIGHT PART-OF-THE-PAGE; in a frame, since a page that is scrolled itself is pictured empty
  echo "<body style='margin:0'><iframe src='file://$run/report.html$3' style='width:1200px;height:$2px;border:0'>" \
    > "$work/frame.html"
  chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
    --user-data-dir="$work/profile" --virtual-time-budget=3000 --window-size="1200,$2" \
    --screenshot="$docs/$1.png" "file://$work/frame.html" 2> "$work/log" || cat "$work/log"
  python -c "import sys, PIL.Image as I; I.open(sys.argv[1]).convert('RGB').quantize(256).save(sys.argv[1], optimize=True)" \
    "$docs/$1.png"
}

python "$docs/../report.py" "$run"
picture report 1140 ''
picture rollouts 630 '#group=9'
