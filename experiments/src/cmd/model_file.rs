//! The model's parameters as a TOML file. `elfen lab calibrate` writes it; `simulate` and `plan`
//! read it.

use std::fs;
use std::path::Path;

use elfen_console::failure::{Failure, Status, named};
use serde::{Deserialize, Serialize};

use simulator::batches::{self, CHECKS, KINDS};
use simulator::pair::Batch;
use simulator::time::nanoseconds;

/// The highest valid slowdown. Measured slowdowns below 1 are noise and become 1.
const HIGHEST: f64 = 1000.0;
/// The longest valid time to enter or to leave a nap.
const LONGEST_NS: f64 = 1e9;

/// The contents of the file. Unknown keys are refused, so that a mistyped key does not leave a
/// default in place.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelFile {
    pub(crate) machine: Measured,
    /// The naps of the machine. The first of them is the default.
    #[serde(default)]
    pub(crate) nap: Vec<NapTimes>,
    pub(crate) batch: Vec<Interference>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Measured {
    pub(crate) elfen: String,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) lanes: String,
    /// Whether these lanes share a core. If not, the slowdowns are not those of SMT.
    pub(crate) siblings: bool,
    pub(crate) command: String,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NapTimes {
    pub(crate) name: String,
    /// `None` if it could not be measured. The thesis's value is used then, and the output says so.
    pub(crate) sleep_ns: Option<f64>,
    pub(crate) wake_ns: Option<f64>,
    /// The slowdown of the service while the batch lane naps.
    pub(crate) nap_slowdown: Option<f64>,
    pub(crate) nap_slowdown_ci95: Option<[f64; 2]>,
}

impl NapTimes {
    fn check(&self) -> Result<(), String> {
        let Self { name, sleep_ns, wake_ns, nap_slowdown, .. } = self;
        if batches::nap(name).is_none() {
            let known = batches::NAPS.map(|nap| nap.name).join(", ");
            return Err(format!("{name:?} is none of {known}"));
        }
        let times = [sleep_ns, wake_ns].into_iter().flatten();
        if let Some(ns) = times.into_iter().find(|ns| !(0.0..=LONGEST_NS).contains(*ns)) {
            return Err(format!("{name}: {ns} ns is not a valid time of a nap"));
        }
        match nap_slowdown.filter(|slowdown| !(*slowdown > 0.0 && *slowdown <= HIGHEST)) {
            Some(slowdown) => Err(format!("{name}: {slowdown} is not a valid slowdown")),
            None => Ok(()),
        }
    }

    /// Returns the nap with the values of the file, and with the thesis's values where the file has
    /// none.
    pub(crate) fn nap(&self) -> batches::Nap {
        let thesis = batches::nap(&self.name).unwrap_or(batches::NAPS[0]);
        batches::Nap {
            name: thesis.name,
            sleep_ns: self.sleep_ns.map_or(thesis.sleep_ns, nanoseconds),
            wake_ns: self.wake_ns.map_or(thesis.wake_ns, nanoseconds),
            slowdown_milli: self.nap_slowdown.map_or(thesis.slowdown_milli, milli),
        }
    }

    /// Returns the names of the options whose values the file does not give.
    pub(crate) fn lacking(&self) -> Vec<&'static str> {
        let values =
            [("nap-slowdown", self.nap_slowdown), ("sleep", self.sleep_ns), ("wake", self.wake_ns)];
        values.into_iter().filter_map(|(option, value)| value.is_none().then_some(option)).collect()
    }
}

/// How a request and a batch program slow each other when they share a core.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Interference {
    pub(crate) name: String,
    pub(crate) request_slowdown: f64,
    pub(crate) request_slowdown_ci95: Option<[f64; 2]>,
    pub(crate) batch_slowdown: f64,
    pub(crate) batch_slowdown_ci95: Option<[f64; 2]>,
}

impl Interference {
    /// Returns the batch program on a lane with this nap. As in the thesis, it has checks.
    pub(crate) fn beside(&self, nap: &batches::Nap) -> Batch {
        Batch {
            request_slowdown_milli: milli(self.request_slowdown),
            batch_slowdown_milli: milli(self.batch_slowdown),
            ..KINDS[0].on(nap, CHECKS)
        }
    }
}

fn milli(slowdown: f64) -> u64 {
    nanoseconds(slowdown.max(1.0) * 1000.0)
}

impl ModelFile {
    pub(crate) fn read(file: &Path) -> Result<Self, Failure> {
        let wrong = |why: String| {
            let what = named("model", file);
            let fix = "use a file that `elfen lab calibrate` wrote, or a file of the same format";
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
            return Err("the file has no batch program".to_owned());
        }
        for Interference { name, request_slowdown, batch_slowdown, .. } in &self.batch {
            for slowdown in [request_slowdown, batch_slowdown] {
                if !(*slowdown > 0.0 && *slowdown <= HIGHEST) {
                    return Err(format!("{name}: {slowdown} is not a valid slowdown"));
                }
            }
        }
        self.nap.iter().try_for_each(|nap| nap.check().map_err(|why| format!("nap {why}")))
    }

    /// Returns the batch program with this name, or the first one.
    pub(crate) fn interference(&self, name: Option<&str>) -> Option<&Interference> {
        let named = |of: &&Interference| name.is_none_or(|name| of.name == name);
        self.batch.iter().find(named)
    }

    /// Returns the nap with this name, or the first one.
    pub(crate) fn nap(&self, name: Option<&str>) -> Option<&NapTimes> {
        self.nap.iter().find(|nap| name.is_none_or(|name| nap.name == name))
    }

    /// Returns the batch on a lane with the first nap of the file. Values that the file does not
    /// give are the thesis's.
    pub(crate) fn batch(&self, of: &Interference) -> Batch {
        of.beside(&self.nap(None).map_or(batches::NAPS[0], NapTimes::nap))
    }

    /// Returns the text of the file.
    pub(crate) fn text(&self) -> String {
        let mut text =
            "# How programs that share a core slow each other down, for `elfen lab simulate \
                        --model` and `elfen lab plan --model`.\n"
                .to_owned();
        if !self.machine.siblings {
            text +=
                "# NOT MEASURED ON SMT: the kernel does not show that these lanes share a core.\n";
        }
        text + &toml::to_string(self).expect("texts, numbers and tables of them are TOML")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = r#"
        [machine]
        elfen = "0.1.0"
        kernel = "6.18"
        cpu = "a \"quoted\" \\ \u007f one"
        lanes = "0:4"
        siblings = true
        command = "elfen lab calibrate"
        [[nap]]
        name = "mwaitx"
        wake_ns = 512.5
        [[nap]]
        name = "spin"
        sleep_ns = 0.0
        nap_slowdown = 1.25
        nap_slowdown_ci95 = [1.125, 1.375]
        [[batch]]
        name = "loop"
        request_slowdown = 1.25
        request_slowdown_ci95 = [1.125, 1.5]
        batch_slowdown = 0.98
    "#;

    fn model() -> ModelFile {
        toml::from_str(MODEL).unwrap()
    }

    /// Goal: a file has the values with which it was written. Method: write and read a model with
    /// all values, in which some optional values are absent.
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
        assert_eq!((batch.request_slowdown_milli, batch.batch_slowdown_milli), (1250, 1000));
        let thesis = batches::nap("mwaitx").unwrap();
        assert_eq!((batch.sleep_ns, batch.polling), (thesis.sleep_ns, CHECKS));
        assert_eq!((batch.wake_ns, batch.nap_slowdown_milli), (nanoseconds(512.5), 1000));
        let spin = model.nap(Some("spin")).unwrap();
        assert_eq!((spin.nap().slowdown_milli, spin.lacking()), (1250, vec!["wake"]));
        assert!(model.nap(Some("umwait")).is_none());
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
            assert!(wrong.check().unwrap_err().contains("is not a valid slowdown"));
        }
        let mut wrong = model();
        wrong.nap[0].wake_ns = Some(-1.0);
        assert!(wrong.check().unwrap_err().contains("is not a valid time"));
        wrong.nap[0] = NapTimes { name: "doze".to_owned(), ..model().nap[1].clone() };
        assert!(wrong.check().unwrap_err().contains("\"doze\" is none of device"));
    }
}
