i=0
sum=0
while [ $i -lt $((200000 * ${1:-1})) ]; do
	sum=$(((sum * 31 + i) % 1000003))
	i=$((i + 1))
done
echo $sum
