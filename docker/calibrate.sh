#!/bin/sh
# Make the profile $PROFILE of the model $MODEL, unless it is there. Arguments are passed on to `python -m calib run`.
# What was recorded stays next to the profile, so a second start continues after an interruption.
set -eu
: "${MODEL:?name or folder of the model}" "${PROFILE:?path of the profile, NAME.safetensors}"

# Of several replicas on one volume the first calibrates, and the others wait for it.
exec 9> "$PROFILE.lock"
flock 9
if [ -f "$PROFILE" ]; then
    echo "found $PROFILE"
    exit 0
fi
unfinished="${PROFILE%.safetensors}.unfinished.safetensors"
python3 -m calib run --model "$MODEL" --work "$PROFILE.recordings" --output "$unfinished" "$@"
mv "$unfinished" "$PROFILE"
rm -rf "$PROFILE.recordings"
