//! The measured programs: built by the machine's compiler into a folder that goes with us, and
//! started.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use elfen_machine::affinity;

use super::error::{Error, failed};
use super::kind::Kind;
use super::run::Run;

pub(super) const PROGRAMS: [&str; 4] = ["calls", "fib", "matrix", "words"];

/// Repetitions in one process; the shortest counts, as the one that was disturbed least.
const REPETITIONS: u32 = 10;

/// The files that the programs are built from.
const FILES: [(&str, &str); 4] = [
    ("programs.c", include_str!("programs.c")),
    ("returning.c", RETURNING),
    ("elfen_abi.h", include_str!("../../../../elfen-rt/include/elfen_abi.h")),
    ("elfen_check.h", include_str!("../../../../elfen-rt/include/elfen_check.h")),
];

/// Hooks that do nothing, for what a call costs alone.
const RETURNING: &str = "\
__asm__(\".globl mcount\\n.type mcount, @function\\nmcount:\\n\\tret\\n\"
	\".globl __fentry__\\n.type __fentry__, @function\\n__fentry__:\\n\\tret\\n\");
void __cyg_profile_func_enter(void *function, void *from) { (void)function; (void)from; }
void __cyg_profile_func_exit(void *function, void *from) { (void)function; (void)from; }
";

/// A folder of our own, with the sources in it.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("elfen-bench-check-{}", std::process::id()));
        // Fails if it exists: no files of another process are used.
        DirBuilder::new().mode(0o700).create(&path)?;
        let folder = Self(path);
        for (name, content) in FILES {
            std::fs::write(folder.0.join(name), content)?;
        }
        Ok(folder)
    }

    /// The library whose hooks only return.
    pub(super) fn returning(&self) -> Result<PathBuf, Error> {
        let library = self.0.join("returning.so");
        compile(&self.0, &["-shared", "-fPIC", "returning.c", "-o", "returning.so"])?;
        Ok(library)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What can't be removed stays in the folder for temporary files.
        let _removed = std::fs::remove_dir_all(&self.0);
    }
}

/// One build of the programs.
#[derive(Debug)]
pub(super) struct Built(PathBuf);

/// What a program printed.
#[derive(Debug)]
pub(super) struct Printed {
    pub(super) best_ns: u64,
    pub(super) computed: String,
    /// Checks in one repetition, if they were counted.
    pub(super) checks: u64,
}

impl Built {
    pub(super) fn new(folder: &Folder, kind: &Kind) -> Result<Self, Error> {
        Self::with(folder, kind.name, kind.flags)
    }

    pub(super) fn plain(folder: &Folder) -> Result<Self, Error> {
        Self::with(folder, "plain", &[])
    }

    /// Counts where checks would be.
    pub(super) fn counting(folder: &Folder) -> Result<Self, Error> {
        Self::with(folder, "counting", &["-DCOUNT"])
    }

    fn with(folder: &Folder, name: &str, flags: &[&str]) -> Result<Self, Error> {
        let object = format!("{name}.o");
        // In two steps: linked with -pg, a program would profile itself as well.
        compile(&folder.0, &[&["-c", "programs.c", "-o", &object], flags].concat())?;
        compile(&folder.0, &[&object, "-o", name])?;
        Ok(Self(folder.0.join(name)))
    }

    pub(super) fn run(
        &self,
        run: &Run,
        program: &'static str,
        kind: Option<&Kind>,
    ) -> Result<Printed, Error> {
        let output = self.start(Command::new(&self.0), run, program, kind, REPETITIONS)?;
        let line = String::from_utf8_lossy(&output.stdout);
        Printed::parse(&line).ok_or_else(|| failed(program, kind, format!("it printed {line:?}")))
    }

    /// Instructions of one repetition: the difference that two more of them make, halved.
    pub(super) fn instructions(
        &self,
        run: &Run,
        program: &'static str,
        kind: Option<&Kind>,
    ) -> Result<u64, Error> {
        let [few, many] = [1, 3].map(|repetitions| {
            let mut valgrind = Command::new("valgrind");
            valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(&self.0);
            let output = self.start(valgrind, run, program, kind, repetitions)?;
            collected(&String::from_utf8_lossy(&output.stderr))
                .ok_or_else(|| failed(program, kind, "callgrind printed no count"))
        });
        Ok(many?.saturating_sub(few?) / 2)
    }

    fn start(
        &self,
        mut command: Command,
        run: &Run,
        program: &'static str,
        kind: Option<&Kind>,
        repetitions: u32,
    ) -> Result<std::process::Output, Error> {
        run.prepare(&mut command, kind);
        command.arg(program).arg(repetitions.to_string());
        let cpu = run.cpu;
        let pin = move || affinity::pin(cpu);
        // SAFETY: `pin` allocates a mask and makes one system call; this process has no other
        // thread that could hold the allocator's lock while we fork.
        unsafe { command.pre_exec(pin) };
        let name = command.get_program().to_string_lossy().into_owned();
        let output =
            command.output().map_err(|error| failed(program, kind, format!("{name}: {error}")))?;
        if !output.status.success() {
            return Err(failed(program, kind, format!("it ended with {}", output.status)));
        }
        if kind.is_some_and(|kind| !run.was_checked(kind)) {
            return Err(failed(program, kind, "it met no check"));
        }
        Ok(output)
    }
}

/// `Collected : 1731181` in what callgrind prints.
fn collected(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

fn compile(folder: &Path, arguments: &[&str]) -> Result<(), Error> {
    let mut command = Command::new("cc");
    // Aligned, so that a kind is not judged by where it happened to put a loop.
    command
        .args(["-O2", "-falign-functions=64", "-falign-loops=32", "-I."])
        .args(arguments)
        .current_dir(folder);
    let output = command.output().map_err(Error::NoCompiler)?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let first = message.lines().find(|line| line.contains("error")).or(message.lines().next());
    let message = first.unwrap_or("it says nothing").to_owned();
    Err(Error::Compiler { flags: arguments.join(" "), message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrinds_count_is_found() {
        let text = "==9== Events    : Ir\n==9== Collected : 1731181\n==9== \n";
        assert_eq!(collected(text), Some(1_731_181));
        assert_eq!(collected("==9== Collected : \n"), None);
        assert_eq!(collected(""), None);
    }
}
