import hashlib, json, sys

def row(n):
    return {"n": n, "hash": hashlib.sha256(str(n).encode()).hexdigest()}

for _ in range(int((sys.argv + ["1"])[1])):
    rows = [row(n) for n in range(60000)]
    text = json.dumps(rows, sort_keys=True)
print(hashlib.sha256(text.encode()).hexdigest())
