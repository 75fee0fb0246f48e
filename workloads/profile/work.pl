# A table of words, for the paths of Perl: work.pl ROUNDS
my $rounds = shift // 1;
my $all = 0;
for my $round (1 .. $rounds) {
    my %words;
    for my $i (1 .. 60000) {
        my $key = join ":", $i % 977, substr("abcdefghij", $i % 10);
        $words{$key} .= chr(65 + $i % 26);
    }
    for my $key (sort keys %words) {
        $all += length $words{$key} if $key =~ /^(\d+):(c|d|e).*$/;
    }
}
print "$all\n";
