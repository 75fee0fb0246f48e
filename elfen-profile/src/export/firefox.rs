//! The format of the Firefox Profiler. Its time axis has no meaning here: each stack is one sample,
//! and its weight is the number of instructions that it executed.

use std::collections::HashMap;
use std::io;
use std::time::SystemTime;

use fxprof_processed_profile::{
    CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, Profile as Viewed, ReferenceTimestamp,
    SamplingInterval, StringHandle, Timestamp, WeightType,
};

use crate::profile::Profile;
use crate::stacks::{Sources, Stacks, UNKNOWN};
use crate::symbols::ProfileSymbols;

const MS: u64 = 1_000_000;

pub(crate) fn profile(
    profile: &Profile,
    symbols: &ProfileSymbols,
    sources: &Sources,
) -> io::Result<Vec<u8>> {
    let stacks = Stacks::new(profile, symbols);
    let began = ReferenceTimestamp::from_system_time(SystemTime::UNIX_EPOCH);
    let name = profile.program.join(" ");
    let mut viewed = Viewed::new(&name, began, SamplingInterval::from_millis(1));
    let start = Timestamp::from_nanos_since_reference(0);
    let process = viewed.add_process(&name, 1, start);
    let thread = viewed.add_thread(process, 1, start, true);
    viewed.set_thread_samples_weight_type(thread, WeightType::Samples);
    let unknown = viewed.intern_string(UNKNOWN);
    let mut sums: Vec<(Vec<StringHandle>, u64)> = Vec::new();
    let mut numbers: HashMap<Vec<StringHandle>, usize> = HashMap::new();
    let mut frames = Vec::new();
    for (end, count) in stacks.all() {
        let is_cut = stacks.frames(end, &mut frames);
        let outer = is_cut.then_some(unknown);
        let mut words: Vec<StringHandle> = outer.into_iter().collect();
        for frame in frames.iter().rev() {
            let shown = stacks.shown(frame, sources);
            words.extend(shown.iter().rev().map(|one| viewed.intern_string(&one.name)));
        }
        let number = *numbers.entry(words).or_insert_with_key(|words| {
            sums.push((words.clone(), 0));
            sums.len() - 1
        });
        sums[number].1 = sums[number].1.saturating_add(count.instructions);
    }
    // A weight has 31 bits.
    let most = sums.iter().map(|(_, sum)| *sum).max().unwrap_or(0);
    let unit = most.div_ceil(i32::MAX.unsigned_abs().into()).max(1);
    for (number, (words, sum)) in (0..).zip(&sums) {
        let frames = words.iter().map(|&name| FrameInfo {
            frame: Frame::Label(name),
            category_pair: CategoryHandle::OTHER.into(),
            flags: FrameFlags::empty(),
        });
        let stack = viewed.intern_stack_frames(thread, frames);
        let weight = i32::try_from(sum / unit).unwrap_or(i32::MAX);
        let at = Timestamp::from_nanos_since_reference(number * MS);
        viewed.add_sample(thread, at, stack, CpuDelta::ZERO, weight);
    }
    Ok(serde_json::to_vec(&viewed)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::tests;

    #[test]
    fn each_stack_is_a_sample_with_its_instructions_as_weight() {
        let (known, symbols) = tests::profile();
        let json = profile(&known, &symbols, &Sources::default()).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let samples = &json["threads"][0]["samples"];
        assert_eq!(samples["weight"], serde_json::json!([30, 70]), "{json}");
    }
}
