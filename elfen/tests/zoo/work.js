const count = new Map();
let n = 1n;
for (let i = 0; i < 1000000 * (process.argv[2] ?? 1); i++) {
	n = (n * 1103515245n + 12345n) % 2147483648n;
	const key = Number(n % 997n);
	count.set(key, (count.get(key) ?? 0) + 1);
}
const sorted = [...count].sort((a, b) => a[0] - b[0]);
console.log(sorted.map(([key, value]) => `${key}=${value}`).join(","));
