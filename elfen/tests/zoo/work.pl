my %count;
my $n = 1;
for (1..600000 * ($ARGV[0] // 1)) {
    $n = ($n * 1103515245 + 12345) % 2147483648;
    $count{$n % 997}++;
}
print join(',', map { $count{$_} } sort { $a <=> $b } keys %count), "\n";
