//! Goal: samples estimate what really happens on the core.
//! Method: runs of made programs, with estimates next to exact counts.

use elfen_core_model::estimate::{Envelope, Fit, SiteEstimate, estimate, fit};
use elfen_core_model::machine::Machine;
use elfen_core_model::pipeline::{self, Fetched, NEVER, Totals};
use elfen_core_model::sample::{Counting, Kind, Outcome, Sampler, Sampling};
use elfen_core_model::synthetic::{random, three_loops};
use elfen_core_model::trace::Trace;
use elfen_core_model::truth::{SiteTruth, Sites, Truth, kind_of};

struct Run {
    sampler: Sampler,
    sites: Sites,
    truth: Vec<SiteTruth>,
    estimates: Vec<SiteEstimate>,
    totals: Totals,
    fit: Fit,
}

fn sampling(every: u64, machine: &Machine) -> Sampling {
    let window = machine.map.reorder + machine.fetch.queue;
    let counting = Counting::Instructions;
    let fetch_width = machine.fetch.width;
    Sampling { every, counting, ways: 2, window, seed: 5, fetch_width }
}

fn run(trace: &Trace, machine: &Machine, sampling: Sampling) -> Run {
    let sites = Sites::new(trace);
    let mut sampler = Sampler::new(sampling);
    let mut truth = Truth::new(&sites);
    let kind = |one: &Fetched| -> Kind { kind_of(&trace.instructions[one.instruction as usize]) };
    let totals = pipeline::run(trace, machine, |fetched| {
        truth.see(fetched);
        sampler.see(fetched, kind);
    });
    let truth = truth.finish();
    let estimates = estimate(&sites, &sampler.samples, &sampler.pairs);
    let fit = fit(&estimates, &truth, &sampling, machine.issue.width);
    Run { sampler, sites, truth, estimates, totals, fit }
}

#[test]
fn estimates_lie_around_the_truth() {
    let trace = random(3, 60, 4_000_000);
    for name in ["21264", "wide"] {
        let machine = Machine::built_in(name).unwrap();
        let found = run(&trace, &machine, sampling(100, &machine));
        let share = found.fit.retired.share().unwrap();
        assert!((0.55..0.85).contains(&share), "{name}: {:?}", found.fit);
        let ratio = found.fit.wasted / found.fit.wasted_truly;
        assert!((0.93..1.07).contains(&ratio), "{name}: {ratio} {:?}", found.fit);
        assert!(found.fit.worst_named >= 15, "{name}: {:?}", found.fit);
        let samples = found.sampler.samples.len() as u64;
        let expected = (found.totals.retired + found.totals.aborted) / 100;
        assert!(samples.abs_diff(expected) < expected / 20, "{samples} {expected}");
        let aborted: u64 = found.truth.iter().map(|one| one.aborted).sum();
        assert_eq!(aborted, found.totals.aborted);
    }
}

/// Goal: useful overlap is counted as the definition says. Method: count it pair by pair.
#[test]
fn truth_agrees_with_a_count_of_all_pairs() {
    let trace = random(9, 40, 3_000);
    let machine = Machine::built_in("21264").unwrap();
    let found = run(&trace, &machine, sampling(50, &machine));
    let mut all: Vec<Fetched> = Vec::new();
    pipeline::run(&trace, &machine, |fetched| all.push(*fetched));
    let mut expected = vec![SiteTruth::default(); found.sites.len()];
    for one in &all {
        let site = &mut expected[found.sites.of(one.instruction)];
        if one.abort.is_none() {
            site.retired += 1;
        } else {
            site.aborted += 1;
        }
        site.dcache_misses += u64::from(one.events.dcache_miss);
        site.mispredicted += u64::from(one.events.mispredicted);
        site.in_progress += one.end() - one.times.fetch;
        let near = all.iter().filter(|other| other.number.abs_diff(one.number) < 2000);
        let overlaps = |other: &&Fetched| {
            let issue = other.times.issue;
            other.number != one.number
                && other.abort.is_none()
                && issue != NEVER
                && (one.times.fetch..one.end()).contains(&issue)
        };
        site.useful += near.filter(overlaps).count() as u64;
    }
    assert_eq!(found.truth, expected);
}

/// Goal: Figure 7. Latency ranks an instruction first that wastes less than others; pairs find the
/// order of the slots that are really wasted.
#[test]
fn pairs_find_what_latency_does_not() {
    let trace = three_loops(2000, 1);
    let machine = Machine::built_in("21264").unwrap();
    let by = sampling(40, &machine);
    let found = run(&trace, &machine, by);
    let width = machine.issue.width;
    let order = |value: &dyn Fn(usize) -> f64| {
        let mut order: Vec<usize> = (0..found.sites.len()).collect();
        order.sort_by(|&one, &other| value(other).total_cmp(&value(one)));
        order
    };
    let by_latency = order(&|site| found.truth[site].in_progress as f64);
    let truly = order(&|site| found.truth[site].wasted(width) as f64);
    let by_pairs = order(&|site| found.estimates[site].wasted(&by, width));
    let is_in_third_loop = |site: usize| found.sites.site(site).unwrap().pc >= 0x42_0000;
    // The two with the highest latency are in the loop that wastes little.
    assert!(by_latency[..2].iter().all(|&site| is_in_third_loop(site)), "{by_latency:?}");
    assert!(!truly[..5].iter().any(|&site| is_in_third_loop(site)), "{truly:?}");
    let [mut named, mut expected] = [&by_pairs, &truly].map(|order| order[..3].to_vec());
    named.sort_unstable();
    expected.sort_unstable();
    assert_eq!(named, expected);
    assert!(!by_pairs[..6].iter().any(|&site| is_in_third_loop(site)), "{by_pairs:?}");
}

#[test]
fn opportunities_without_instructions_are_counted() {
    let trace = random(3, 60, 200_000);
    let machine = Machine::built_in("21264").unwrap();
    let by = Sampling { counting: Counting::Opportunities, ways: 1, ..sampling(50, &machine) };
    let found = run(&trace, &machine, by);
    let sampler = &found.sampler;
    let chosen = sampler.samples.len() as u64 + sampler.empty_beside + sampler.empty_cycles;
    let all = found.totals.cycles * 4 / 50;
    assert!(chosen.abs_diff(all) < all / 20, "{chosen} {all}");
    let fetched = found.totals.retired + found.totals.aborted;
    let share = sampler.samples.len() as f64 / chosen as f64;
    let expected = fetched as f64 / (found.totals.cycles * 4) as f64;
    assert!((share - expected).abs() < 0.02, "{share} {expected}");
    assert!(sampler.empty_beside > 0 && sampler.empty_cycles > sampler.empty_beside);
}

#[test]
fn groups_have_one_first_instruction() {
    let trace = random(3, 60, 100_000);
    let machine = Machine::built_in("21264").unwrap();
    let by = Sampling { ways: 4, ..sampling(40, &machine) };
    let found = run(&trace, &machine, by);
    // Groups are closer together than their windows are long: several are in flight.
    for group in found.sampler.pairs.iter() {
        assert!((1..=by.window).contains(&group.distance), "{}", group.distance);
    }
    let pairs = found.sampler.pairs.len();
    let samples = found.sampler.samples.len();
    assert!(pairs.abs_diff(3 * samples) < 30, "{pairs} {samples}");
    let ratio = found.fit.wasted / found.fit.wasted_truly;
    assert!((0.9..1.1).contains(&ratio), "{ratio}");
}

#[test]
fn fields_that_do_not_exist_are_absent() {
    let trace = random(3, 60, 100_000);
    let machine = Machine::built_in("21264").unwrap();
    let found = run(&trace, &machine, sampling(10, &machine));
    let mut seen = [0; 4];
    for sample in &found.sampler.samples {
        let code = &trace.instructions[sample.instruction.unwrap() as usize];
        let is_retired = sample.outcome == Some(Outcome::Retired);
        assert_eq!(sample.events.taken.is_some(), code.class.branch().is_some());
        assert_eq!(sample.events.dcache_miss.is_some(), is_retired && code.addresses() > 0);
        let latencies = &sample.latencies;
        let waits = latencies.load_issue_to_completion.is_some();
        assert!(!waits || code.reads_memory());
        assert_eq!(latencies.retire_ready_to_retire.is_some(), is_retired);
        assert_eq!(latencies.fetch_to_abort.is_some(), !is_retired);
        seen[0] += u32::from(!is_retired && latencies.fetch_to_map.is_none());
        seen[1] += u32::from(!is_retired && latencies.issue_to_retire_ready.is_some());
        seen[2] += u32::from(waits);
        seen[3] += u32::from(sample.context.is_none());
    }
    assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
}

#[test]
fn an_envelope_of_poisson_counts_holds_two_thirds() {
    let mut envelope = Envelope::default();
    let trace = random(11, 400, 3_000_000);
    let machine = Machine::built_in("21264").unwrap();
    for seed in 0..4 {
        let by = Sampling { seed, ways: 1, ..sampling(500, &machine) };
        let found = run(&trace, &machine, by);
        envelope.inside += found.fit.retired.inside;
        envelope.points += found.fit.retired.points;
    }
    let share = envelope.share().unwrap();
    assert!(envelope.points > 500 && (0.60..0.75).contains(&share), "{share} {envelope:?}");
}

/// Goal: two threads on one core are slower than alone, and together faster than one.
#[test]
fn two_traces_share_a_core() {
    let machine = Machine::built_in("wide").unwrap();
    let traces = [random(3, 60, 200_000), random(4, 60, 200_000)];
    let mut counts = [0; 2];
    let mut cycles: [Vec<u64>; 2] = Default::default();
    let totals = pipeline::run_beside([&traces[0], &traces[1]], &machine, |thread, fetched| {
        counts[thread] += u64::from(fetched.abort.is_none());
        cycles[thread].push(fetched.times.fetch);
    });
    let ipc = |totals: &Totals| totals.retired as f64 / totals.cycles as f64;
    let mut together = 0.0;
    for (thread, trace) in traces.iter().enumerate() {
        assert_eq!(totals[thread].retired, counts[thread]);
        let alone = pipeline::run(trace, &machine, |_| {});
        let share = ipc(&totals[thread]) / ipc(&alone);
        assert!((0.3..1.0).contains(&share), "{share}");
        together += share;
        // They fetch in turn.
        assert!(cycles[thread].iter().all(|cycle| cycle % 2 == thread as u64));
    }
    assert!(together > 1.1, "{together}");
}
