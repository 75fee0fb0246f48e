//! The model's parameters as a TOML file: `elfen calibrate` writes it, `simulate` and `plan` read it.

use std::fs;
use std::path::Path;

use experiments::simulate::batches::KINDS;
use experiments::simulate::pair::Batch;
use experiments::simulate::time::nanoseconds;
use serde::{Deserialize, Serialize};

use super::failure::{Failure, Status, named};

/// What a slowdown can be; measured ones below 1 are noise, and count as 1.
const HIGHEST: f64 = 1000.0;
/// A time beyond this is no latency of a nap.
const LONGEST_NS: f64 = 1e9;

/// Keys that are not listed are refused: a typing error must not leave a default in place.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelFile {
    pub(crate) machine: Measured,
    pub(crate) nap: NapTimes,
    pub(crate) batch: Vec<Interference>,
    /// Two batch programs beside each other: for the reader, the model has no use for them.
    #[serde(default)]
    pub(crate) pair: Vec<PairOf>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Measured {
    pub(crate) elfen: String,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) lanes: String,
    /// Whether these lanes share a core; if not, the file is of no SMT machine.
    pub(crate) siblings: bool,
    pub(crate) command: String,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NapTimes {
    pub(crate) name: String,
    /// Absent where it could not be measured: the thesis's is used then.
    pub(crate) sleep_ns: Option<f64>,
    pub(crate) wake_ns: Option<f64>,
}

/// The service and a batch program, each beside the other.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Interference {
    pub(crate) name: String,
    pub(crate) request_slowdown: f64,
    pub(crate) request_slowdown_ci95: Option<[f64; 2]>,
    pub(crate) batch_slowdown: f64,
    pub(crate) batch_slowdown_ci95: Option<[f64; 2]>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PairOf {
    pub(crate) first: String,
    pub(crate) second: String,
    pub(crate) of_first: f64,
    pub(crate) of_second: f64,
}

impl ModelFile {
    pub(crate) fn read(file: &Path) -> Result<Self, Failure> {
        let wrong = |why: String| {
            let what = named("model", file);
            let fix = "give a file that `elfen calibrate` wrote, or one like it";
            Failure::new(Status::Usage, what, why, fix)
        };
        let text = fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
        let model: Self = toml::from_str(&text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
            wrong(format!("line {line}: {}", error.message()))
        })?;
        model.check().map_err(wrong)?;
        Ok(model)
    }

    fn check(&self) -> Result<(), String> {
        if self.batch.is_empty() {
            return Err("it has no batch program".to_owned());
        }
        for Interference { name, request_slowdown, batch_slowdown, .. } in &self.batch {
            for slowdown in [request_slowdown, batch_slowdown] {
                if !(*slowdown > 0.0 && *slowdown <= HIGHEST) {
                    return Err(format!("{name}: {slowdown} is no slowdown"));
                }
            }
        }
        let times = [self.nap.sleep_ns, self.nap.wake_ns];
        match times.into_iter().flatten().find(|ns| !(0.0..=LONGEST_NS).contains(ns)) {
            Some(ns) => Err(format!("nap {}: {ns} ns is no time of a nap", self.nap.name)),
            None => Ok(()),
        }
    }

    /// The batch program of this name, or the first one.
    pub(crate) fn interference(&self, name: Option<&str>) -> Option<&Interference> {
        let named = |of: &&Interference| name.is_none_or(|name| of.name == name);
        self.batch.iter().find(named)
    }

    /// The model's batch; what the file does not say is the thesis's.
    pub(crate) fn batch(&self, of: &Interference) -> Batch {
        let milli = |slowdown: f64| nanoseconds(slowdown.max(1.0) * 1000.0);
        let thesis = KINDS[0].batch();
        Batch {
            request_slowdown_milli: milli(of.request_slowdown),
            batch_slowdown_milli: milli(of.batch_slowdown),
            sleep_ns: self.nap.sleep_ns.map_or(thesis.sleep_ns, nanoseconds),
            wake_ns: self.nap.wake_ns.map_or(thesis.wake_ns, nanoseconds),
            ..thesis
        }
    }

    /// As it is read.
    pub(crate) fn text(&self) -> String {
        let Measured { elfen, kernel, cpu, lanes, siblings, command } = &self.machine;
        let mut text = "# What programs that share a core do to each other, for `elfen simulate --model` and `elfen \
             plan --model`.\n"
            .to_owned();
        if !siblings {
            text += "# NOT MEASURED ON SMT: nothing says that these lanes share a core.\n";
        }
        text += "[machine]\n";
        for (key, value) in [
            ("elfen", elfen),
            ("kernel", kernel),
            ("cpu", cpu),
            ("lanes", lanes),
            ("command", command),
        ] {
            text += &format!("{key} = {}\n", quoted(value));
        }
        text += &format!("siblings = {siblings}\n\n[nap]\nname = {}\n", quoted(&self.nap.name));
        let times = [("sleep_ns", self.nap.sleep_ns), ("wake_ns", self.nap.wake_ns)];
        for (key, ns) in times.into_iter().filter_map(|(key, ns)| Some((key, ns?))) {
            text += &format!("{key} = {ns:.1}\n");
        }
        for one in &self.batch {
            text += &format!("\n[[batch]]\nname = {}\n", quoted(&one.name));
            let slowdowns = [
                ("request_slowdown", one.request_slowdown, one.request_slowdown_ci95),
                ("batch_slowdown", one.batch_slowdown, one.batch_slowdown_ci95),
            ];
            for (key, slowdown, ci95) in slowdowns {
                text += &format!("{key} = {slowdown:.4}\n");
                if let Some([low, high]) = ci95 {
                    text += &format!("{key}_ci95 = [{low:.4}, {high:.4}]\n");
                }
            }
        }
        for PairOf { first, second, of_first, of_second } in &self.pair {
            let (first, second) = (quoted(first), quoted(second));
            text += &format!("\n[[pair]]\nfirst = {first}\nsecond = {second}\n");
            text += &format!("of_first = {of_first:.4}\nof_second = {of_second:.4}\n");
        }
        text
    }
}

/// A string of TOML.
fn quoted(text: &str) -> String {
    let mut quoted = "\"".to_owned();
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted += &format!("\\u{:04X}", u32::from(c)),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelFile {
        ModelFile {
            machine: Measured {
                elfen: "0.1.0".to_owned(),
                kernel: "6.18".to_owned(),
                cpu: "a \"quoted\" \\ \u{7f} one".to_owned(),
                lanes: "0:4".to_owned(),
                siblings: true,
                command: "elfen calibrate".to_owned(),
            },
            nap: NapTimes { name: "mwaitx".to_owned(), sleep_ns: None, wake_ns: Some(512.5) },
            batch: vec![Interference {
                name: "loop".to_owned(),
                request_slowdown: 1.25,
                request_slowdown_ci95: Some([1.125, 1.5]),
                batch_slowdown: 0.98,
                batch_slowdown_ci95: None,
            }],
            pair: vec![PairOf {
                first: "loop".to_owned(),
                second: "loop".to_owned(),
                of_first: 1.5,
                of_second: 1.75,
            }],
        }
    }

    /// Goal: what is written is read as it was. Method: a model with everything, and with what can be absent.
    #[test]
    fn a_model_survives_its_file() {
        let read: ModelFile = toml::from_str(&model().text()).unwrap();
        assert_eq!(read, model());
        assert!(!model().text().contains("NOT MEASURED"));
        let mut by_hand = model();
        by_hand.machine.siblings = false;
        assert!(by_hand.text().contains("NOT MEASURED ON SMT"));
    }

    #[test]
    fn the_models_batch_is_the_files_and_otherwise_the_thesiss() {
        let model = model();
        let batch = model.batch(model.interference(None).unwrap());
        let thesis = KINDS[0].batch();
        assert_eq!((batch.request_slowdown_milli, batch.batch_slowdown_milli), (1250, 1000));
        assert_eq!((batch.sleep_ns, batch.check_ns), (thesis.sleep_ns, thesis.check_ns));
        assert_eq!(batch.wake_ns, nanoseconds(512.5));
        assert!(model.interference(Some("spin")).is_none());
    }

    #[test]
    fn models_without_sense_are_refused() {
        let mut none = model();
        none.batch.clear();
        assert!(none.check().unwrap_err().contains("no batch program"));
        for slowdown in [0.0, -1.0, f64::NAN, 1e9] {
            let mut wrong = model();
            wrong.batch[0].request_slowdown = slowdown;
            assert!(wrong.check().unwrap_err().contains("no slowdown"));
        }
        let mut wrong = model();
        wrong.nap.wake_ns = Some(-1.0);
        assert!(wrong.check().unwrap_err().contains("no time"));
    }
}
