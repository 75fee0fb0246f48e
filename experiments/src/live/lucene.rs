//! The search service of `workloads/lucene`, in Java: compiled for one run, from sources that the
//! command carries, and served by as many virtual machines as are asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::LiveError;
use super::os::Place;
use super::os::Rank::Normal;
use super::process::{Process, wait_for};
use super::scratch::Scratch;

const SOURCES: [(&str, &str); 4] = [
    ("build", include_str!("../../../workloads/lucene/build")),
    ("java/Corpus.java", include_str!("../../../workloads/lucene/java/Corpus.java")),
    ("java/Marks.java", include_str!("../../../workloads/lucene/java/Marks.java")),
    ("java/Search.java", include_str!("../../../workloads/lucene/java/Search.java")),
];
const MAIN: &str = "elfen.Search";
const WORKERS: &str = "1";
/// To compile, on a machine that does other things as well.
const TO_BUILD: Duration = Duration::from_secs(120);
/// To index the articles.
const TO_SERVE: Duration = Duration::from_secs(120);
/// As `elfen-load --template` takes it.
pub(crate) const TEMPLATE: &str = "/search?q={}";

#[derive(Debug)]
pub(crate) struct Lucene {
    class_path: String,
    pub(crate) questions: PathBuf,
}

/// One virtual machine that serves.
#[derive(Debug)]
pub(crate) struct Java {
    process: Process,
    pub(crate) port: u16,
}

impl Lucene {
    /// Compiles it into the folder of this run, and has it ask so many questions.
    pub(crate) fn build(scratch: &Scratch, questions: u32) -> Result<Self, LiveError> {
        let (sources, classes) = (scratch.path("lucene"), scratch.path("classes"));
        let write = |path: &Path, text: &str| {
            fs::write(path, text).map_err(LiveError::io(format!("writing {}", path.display())))
        };
        for folder in [&sources.join("java"), &classes] {
            fs::create_dir_all(folder)
                .map_err(LiveError::io(format!("making {}", folder.display())))?;
        }
        for (name, text) in SOURCES {
            write(&sources.join(name), text)?;
        }
        let mut command = Command::new("bash");
        command.arg(sources.join("build")).arg(&classes);
        let build = Process::start("workloads/lucene", command, &Place::anywhere(Normal), scratch)?;
        let said = build.finish(None, TO_BUILD)?;
        let class_path = class_path(&said).ok_or_else(|| LiveError::Garbled {
            name: "workloads/lucene/build".to_owned(),
            why: format!("{said:?} has no class path"),
        })?;
        let lucene = Self { class_path, questions: scratch.path("questions") };
        let mut command = lucene.java(&[]);
        command.args(["questions", &questions.to_string()]);
        let asks = Process::start("java", command, &Place::anywhere(Normal), scratch)?;
        write(&lucene.questions, &asks.finish(None, TO_SERVE)?)?;
        Ok(lucene)
    }

    fn java(&self, options: &[String]) -> Command {
        let mut command = Command::new("java");
        command.args(options).args(["-cp", &self.class_path, MAIN]);
        command
    }

    /// Starts it, on a free port or on this one, and waits until it serves.
    pub(crate) fn serve(
        &self,
        options: &[String],
        articles: u32,
        port: Option<u16>,
        scratch: &Scratch,
    ) -> Result<Java, LiveError> {
        let chosen = port.map(|port| format!("-Delfen.port={port}"));
        let told = "-Delfen.told=true".to_owned();
        let options: Vec<String> = options.iter().cloned().chain([told]).chain(chosen).collect();
        let mut command = self.java(&options);
        command.args(["serve", &articles.to_string(), WORKERS]);
        let mut process = Process::start_told("java", command, &Place::anywhere(Normal), scratch)?;
        let port = wait_for(&mut process, TO_SERVE, |process| {
            process.printed().strip_suffix('\n')?.parse().ok()
        })?;
        Ok(Java { process, port })
    }
}

impl Java {
    pub(crate) fn lives(&mut self) -> Result<(), LiveError> {
        self.process.lives()
    }

    /// Has it collect its whole heap, which it does soon.
    pub(crate) fn collect(&self) -> Result<(), LiveError> {
        self.process.tell("collect")
    }

    /// Pages that the kernel has given it when it first touched them.
    pub(crate) fn page_faults(&self) -> Option<u64> {
        let line = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).ok()?;
        // The name, in parentheses, may hold anything; minflt is the 10th field of proc(5).
        line.rsplit_once(')')?.1.split_whitespace().nth(7)?.parse().ok()
    }
}

/// The last line of the script says how the service is started.
fn class_path(said: &str) -> Option<String> {
    let line = said.lines().last()?.strip_prefix("java -cp ")?;
    Some(line.rsplit_once(&format!(" {MAIN} "))?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_says_where_the_classes_are() {
        let said = "Note: x\njava -cp /tmp/a b:/usr/c.jar elfen.Search serve 20000 1\n";
        assert_eq!(class_path(said).as_deref(), Some("/tmp/a b:/usr/c.jar"));
        assert_eq!(class_path("javac: no"), None);
    }
}
