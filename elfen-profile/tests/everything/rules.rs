//! Goal: productions see each executed instruction once. Method: a program with known counts, with
//! productions that match always, and with those of the paper.

use std::collections::BTreeMap;

use elfen_profile::profile::{Profile, What};
use elfen_profile::rules::{Register, RuleSet, parse};

use super::counted;
use super::program::{Counts, compile};

const HPS: &str = include_str!("../../../workloads/profile/hps.rules");
const ALWAYS: &str = "
Calls: T.OPCLASS == proc_call -> call(HotMethod), null
Pairs: T.OPCLASS == proc_call -> call(CallPair), null
Returns: T.OPCLASS == return -> null, null
Back: T.OPCLASS == branch && T.Target < T.PC -> call(HotMethod), null
Branches: T.OPCLASS == branch -> null, null
Accesses: T.OPCLASS == mem_op -> null, null
";

fn framework(sparsity: i32, burst: i32) -> RuleSet {
    let fixed = |value| Register { value, is_random: false };
    let rules = parse(HPS).unwrap().with_register("sampleFreq", fixed(-sparsity)).unwrap();
    rules.with_register("burstLength", fixed(-burst)).unwrap()
}

/// The counts of a rule, by the names of functions.
fn counts_of(profile: &Profile, counts: &Counts<'_>, rule: usize) -> BTreeMap<String, u64> {
    let name = |place: Option<elfen_profile::profile::Place>| {
        let place = place.filter(|place| place.file == counts.file)?;
        Some(counts.table.at(counts.table.address_of(place.offset)?)?.name.clone())
    };
    let mut sums = BTreeMap::new();
    for (member, count) in &profile.rule_counts {
        if usize::try_from(member.rule).unwrap() == rule {
            let names = [name(member.from), name(member.to)];
            let names: Vec<String> = names.into_iter().flatten().collect();
            *sums.entry(names.join(" ")).or_default() += count.count;
        }
    }
    sums
}

#[test]
fn productions_see_each_instruction_once() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path(), "counts.c", &[]);
    let sets: &'static [RuleSet] =
        Box::leak(vec![parse(ALWAYS).unwrap(), framework(9, 1), framework(190, 10)].into());
    let what = What { rules: sets, ..What::default() };
    let (_, recorded) = counted(folder.path(), &[program.clone().into()], what);
    let profile = &recorded.profile;
    let counts = Counts::of(profile, &program);
    let calls = counts_of(profile, &counts, 0);
    assert_eq!((calls["branches"], calls["by_pointer"]), (9_000, 5_000));
    let pairs = counts_of(profile, &counts, 1);
    assert_eq!((pairs["main branches"], pairs["main by_pointer"]), (9_000, 5_000));
    assert!(
        profile.rule_counts.iter().all(|(member, count)| member.rule >= 6 || count.bursts == 0)
    );
    // The edges of the same run tell the same.
    let matched = |rule: usize| profile.rules[rule].matched;
    let edges = |is: &dyn Fn(&elfen_profile::profile::Edge) -> bool| -> u64 {
        profile.edges.iter().filter(|(edge, _)| is(edge)).map(|(_, count)| count.count).sum()
    };
    use elfen_stream::counts::EdgeKind;
    let all_calls = edges(&|edge| matches!(edge.kind, EdgeKind::Call | EdgeKind::ComputedCall));
    assert_eq!((matched(0), matched(1)), (all_calls, all_calls));
    let back = edges(&|edge| {
        matches!(edge.kind, EdgeKind::Jump | EdgeKind::Taken)
            && edge.from.file == edge.to.file
            && edge.to.offset < edge.from.offset
    });
    assert_eq!(matched(3), back);
    assert!(matched(2).abs_diff(all_calls) < 200, "{} returns of {all_calls}", matched(2));
    assert!(matched(4) > back && matched(5) > all_calls);
    // Of all events, the framework profiles as many as its registers say. Each program, and the
    // shell before it, begins with counters of its own.
    let events = all_calls + back;
    for (first, sparsity, burst) in [(6, 9, 1), (15, 190, 10)] {
        let (calls, methods) = (matched(first + 6), matched(first + 7));
        let expected = events * burst / (sparsity + burst + 1);
        assert!(methods.abs_diff(expected) <= 3 * burst, "{methods}, not {expected}");
        assert!(calls < methods && calls > 0);
        let bursts: u64 = matched(first + 4) + matched(first + 5);
        assert!(bursts.abs_diff(methods / burst) <= 3, "{bursts} bursts for {methods}");
        let hot = counts_of(profile, &counts, first + 7);
        let share = |name: &str| hot[name] as f64 / methods as f64;
        assert!(share("branches") > 0.05, "{hot:?}");
    }
    // A burst of ten events is one observation of what is in it.
    let of_bursts = profile.rule_counts.iter().filter(|(member, _)| member.rule == 15 + 7);
    let (count, bursts) = of_bursts
        .fold((0, 0), |(count, bursts), (_, one)| (count + one.count, bursts + one.bursts));
    assert!(bursts * 2 < count && bursts > 0, "{count} in {bursts}");
}
