//! Goal: the inspector predicts what the kernel and the loader do with a program's file. Method:
//! programs of every kind, made here by the compiler or by hand.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stage::compile;
use elfen_instrument::{CheckMethod, Compiler, Plan, Reason, best, inspect};

const PATCH: &str = "-fpatchable-function-entry=43";

fn plan_of(program: &Path) -> Plan {
    inspect(program.as_os_str()).unwrap().best()
}

fn why_not(program: &Path, checks: CheckMethod) -> String {
    let program = inspect(program.as_os_str()).unwrap();
    program.allows(checks).unwrap_err().to_string()
}

#[track_caller]
fn registers(name: &str, flags: &[&str]) -> PathBuf {
    let flags: Vec<&str> = flags.iter().copied().chain(["-Wno-psabi"]).collect();
    compile("registers.c", &format!("inspect-{name}"), &flags)
}

/// An executable file with these bytes.
fn executable(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn each_way_is_recognized_in_compiled_programs() {
    assert_recognized(&[
        ("plain", &[], CheckMethod::Live),
        ("mcount", &["-pg"], CheckMethod::Mcount),
        ("cyg", &["-finstrument-functions"], CheckMethod::Cyg),
    ]);
    let inline = compile("programs.c", "inspect-inline", &["-DINLINE"]);
    assert_eq!(plan_of(&inline), Plan { checks: CheckMethod::Inline, preload: true });
}

#[test]
#[ignore = "needs GCC"]
fn each_way_of_gcc_is_recognized_in_compiled_programs() {
    assert_recognized(&[
        ("fentry", &["-pg", "-mfentry"], CheckMethod::Fentry),
        ("patch", &[PATCH], CheckMethod::Patch),
        ("patch-fixed", &[PATCH, "-fno-pie", "-no-pie"], CheckMethod::Patch),
        ("patch-over-fentry", &[PATCH, "-pg", "-mfentry"], CheckMethod::Patch),
    ]);
}

fn assert_recognized(cases: &[(&str, &[&str], CheckMethod)]) {
    for &(name, flags, checks) in cases {
        let program = registers(name, flags);
        let expected = Plan { checks, preload: checks != CheckMethod::Live };
        assert_eq!(plan_of(&program), expected, "{name}");
        assert_eq!(best(program.as_os_str()).unwrap(), checks, "{name}");
    }
}

/// Goal: a program whose hook the library does not define is not reported as checked. Method: a
/// program that calls the C library's other name of the hook.
#[test]
fn hooks_that_the_library_does_not_define_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("other.c"), folder.path().join("other"));
    fs::write(&source, "extern void _mcount(void);\nint main(void) { _mcount(); return 0; }\n")
        .unwrap();
    let built = Command::new("cc").arg(&source).arg("-o").arg(&program).status().unwrap();
    assert!(built.success());
    assert_eq!(plan_of(&program).checks, CheckMethod::Live);
}

/// Goal: programs that generate code are recognized. Method: programs that import or define the
/// functions that start such virtual machines, and one that does neither.
#[test]
fn programs_that_compile_at_run_time_are_recognized() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("starts-java", "extern int JLI_Launch(void);", "JLI_Launch()", Some(Compiler::HotSpot)),
        ("embeds-java", "extern int JNI_CreateJavaVM(void);", "JNI_CreateJavaVM()", {
            Some(Compiler::HotSpot)
        }),
        ("starts-node", "extern int _ZN4node5StartEiPPc(void);", "_ZN4node5StartEiPPc()", {
            Some(Compiler::V8)
        }),
        ("has-v8", "int _ZN2v82V87DisposeEv(void) { return 0; }", "_ZN2v82V87DisposeEv()", {
            Some(Compiler::V8)
        }),
        ("plain", "int java(void) { return 0; }", "java()", None),
    ];
    for (name, declared, called, compiler) in cases {
        let (source, program) = (folder.path().join(format!("{name}.c")), folder.path().join(name));
        fs::write(&source, format!("{declared}\nint main(void) {{ return {called}; }}\n")).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-rdynamic", "-Wl,--unresolved-symbols=ignore-all"]);
        assert!(cc.arg(&source).arg("-o").arg(&program).status().unwrap().success());
        let found = inspect(program.as_os_str()).unwrap();
        assert_eq!(found.compiles(), compiler, "{name}");
    }
}

#[test]
fn a_way_that_the_program_was_not_built_for_names_the_flag() {
    let plain = registers("plain-flags", &[]);
    let cases = [
        (CheckMethod::Patch, "-fpatchable-function-entry=43"),
        (CheckMethod::Fentry, "-pg -mfentry"),
        (CheckMethod::Mcount, "-pg"),
        (CheckMethod::Cyg, "-finstrument-functions"),
        (CheckMethod::Inline, "no check in its source"),
    ];
    for (checks, flag) in cases {
        assert_eq!(why_not(&plain, checks), format!("was not built for it: {flag}"));
    }
}

/// Method: NOPs that no thread executes, and too few NOPs.
#[test]
#[ignore = "needs GCC"]
fn unusable_nops_give_no_room() {
    for (name, flag) in
        [("prefix", "-fpatchable-function-entry=43,43"), ("short", "-fpatchable-function-entry=4")]
    {
        let program = registers(name, &[flag]);
        assert!(why_not(&program, CheckMethod::Patch).starts_with("leaves "), "{name}");
        assert_eq!(plan_of(&program).checks, CheckMethod::Live, "{name}");
    }
}

#[test]
#[ignore = "needs GCC and strip"]
fn stripped_programs_allow_the_same_ways() {
    let program = registers("stripped", &[PATCH]);
    let stripped = Command::new("strip").arg(&program).status().expect("needs strip");
    assert!(stripped.success());
    assert_eq!(plan_of(&program).checks, CheckMethod::Patch);
}

#[test]
fn static_programs_take_no_library() {
    let program = compile("programs.c", "inspect-static", &["-DINLINE", "-static"]);
    for checks in [CheckMethod::Inline, CheckMethod::Mcount, CheckMethod::Patch] {
        let why = why_not(&program, checks);
        assert!(why.starts_with("is statically linked"), "{checks:?}: {why}");
    }
    assert_eq!(plan_of(&program), Plan { checks: CheckMethod::Live, preload: false });
}

#[test]
#[ignore = "needs AddressSanitizer"]
fn a_sanitized_program_takes_no_library() {
    let program = compile("programs.c", "inspect-asan", &["-pg", "-fsanitize=address"]);
    assert!(why_not(&program, CheckMethod::Mcount).starts_with("is built with AddressSanitizer"));
    assert_eq!(plan_of(&program), Plan { checks: CheckMethod::Live, preload: false });
}

/// Method: this test program, whose source has a check.
#[test]
fn a_rust_program_with_checks_needs_no_library() {
    elfen_rt::check!();
    let own = std::env::current_exe().unwrap();
    assert_eq!(plan_of(&own), Plan { checks: CheckMethod::Inline, preload: false });
}

/// The start of an ELF header for another class or machine.
fn header(class: u8, machine: u16) -> Vec<u8> {
    let mut bytes = vec![0u8; 64];
    bytes[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1]);
    bytes[16..18].copy_from_slice(&2u16.to_le_bytes());
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    bytes[20] = 1;
    bytes
}

#[test]
fn programs_for_other_machines_differ_from_damaged_ones() {
    let folder = tempfile::tempdir().unwrap();
    let program = |name: &str, bytes: &[u8]| executable(folder.path(), name, bytes);
    let narrow = program("32-bits", &header(1, 3));
    assert_eq!(
        why_not(&narrow, CheckMethod::Mcount),
        "is a 32-bit program, and the preload library has 64 bits"
    );
    assert_eq!(plan_of(&narrow).checks, CheckMethod::Guard);
    let foreign = program("arm", &header(2, 183));
    assert_eq!(why_not(&foreign, CheckMethod::Patch), "is for another machine (ELF machine 183)");
    for (name, bytes) in
        [("cut", &header(2, 62)[..30]), ("start", b"\x7fELF"), ("odd", &header(9, 62))]
    {
        let broken = inspect(program(name, bytes).as_os_str());
        assert!(matches!(broken, Err(Reason::Corrupt(_))), "{name}: {broken:?}");
    }
    let text = inspect(program("text", b"echo").as_os_str());
    assert!(matches!(text, Err(Reason::NotElf)), "{text:?}");
}

/// Goal: no file makes the inspector panic. Method: a real program, cut, and with bytes changed all
/// over.
#[test]
fn damaged_programs_do_not_panic_the_inspector() {
    inspect_damaged(&registers("damaged", &["-pg"]));
}

#[test]
#[ignore = "needs GCC"]
fn damaged_programs_of_gcc_do_not_panic_the_inspector() {
    inspect_damaged(&registers("damaged-patch", &[PATCH]));
}

fn inspect_damaged(whole: &Path) {
    let whole = fs::read(whole).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for step in 0..400 {
        let mut bytes = whole.clone();
        if step % 4 == 0 {
            bytes.truncate(whole.len() * step / 400);
        } else {
            // First the header, then bytes all over the file.
            let at = if step < 200 { step } else { whole.len() * (step - 200) / 200 };
            bytes[at] ^= 0xff;
        }
        let path = executable(folder.path(), "damaged", &bytes);
        if let Ok(program) = inspect(path.as_os_str()) {
            program.best();
        }
    }
}

#[test]
fn scripts_allow_what_their_interpreter_allows() {
    let folder = tempfile::tempdir().unwrap();
    let program = registers("interpreter", &["-pg"]);
    let script = |name: &str, line: &str| executable(folder.path(), name, format!("#!{line}\n"));
    let direct = script("direct", &program.display().to_string());
    let inspected = inspect(direct.as_os_str()).unwrap();
    assert_eq!((inspected.best().checks, &inspected.file), (CheckMethod::Mcount, &program));
    let through_env = script("env", &format!("/usr/bin/env {}", program.display()));
    assert_eq!(plan_of(&through_env).checks, CheckMethod::Mcount);
    let nested = script("nested", &direct.display().to_string());
    assert_eq!(plan_of(&nested).checks, CheckMethod::Mcount);
    let missing = inspect(script("missing", "/no/such/interpreter").as_os_str()).unwrap_err();
    let text = missing.to_string();
    assert!(
        text.starts_with("is a script, and its interpreter \"/no/such/interpreter\" "),
        "{text}"
    );
    let own = folder.path().join("own");
    let endless = inspect(script("own", &own.display().to_string()).as_os_str());
    assert!(matches!(endless, Err(Reason::Interpreter { .. })), "{endless:?}");
}

#[test]
fn files_that_cannot_be_executed_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let readable = folder.path().join("data");
    fs::write(&readable, "x").unwrap();
    for (path, why) in [
        (folder.path().join("none"), "cannot be read"),
        (folder.path().to_owned(), "is not an executable file"),
        (readable, "is not an executable file"),
        (PathBuf::from("no-such-program-anywhere"), "no such program in any folder of PATH"),
    ] {
        let error = inspect(path.as_os_str()).unwrap_err().to_string();
        assert!(error.starts_with(why), "{path:?}: {error}");
    }
}

#[track_caller]
fn require_root() {
    // SAFETY: takes no arguments.
    assert_eq!(unsafe { libc::geteuid() }, 0, "needs root");
}

/// Method: copies of a program with set-ID bits, which only root can make.
#[test]
#[ignore = "needs root"]
fn programs_of_other_users_with_set_id_bits_take_no_library() {
    require_root();
    let program = registers("set-id", &["-pg"]);
    let folder = tempfile::tempdir().unwrap();
    let copy = |name: &str| executable(folder.path(), name, fs::read(&program).unwrap());
    for (name, user, group, mode) in [("setuid", 65534, 0, 0o4755), ("setgid", 0, 65534, 0o2755)] {
        let path = copy(name);
        chown(&path, Some(user), Some(group)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert!(why_not(&path, CheckMethod::Mcount).starts_with("is set-user-ID"), "{name}");
        assert_eq!(plan_of(&path), Plan { checks: CheckMethod::Live, preload: false });
    }
    let ours = copy("setuid-ours");
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o4755)).unwrap();
    assert_eq!(plan_of(&ours).checks, CheckMethod::Mcount, "its owner gains nothing");
}

/// Method: a copy of a program with a file capability, which only root can give.
#[test]
#[ignore = "needs root and file capabilities"]
fn programs_with_file_capabilities_take_no_library() {
    require_root();
    let program = registers("capable", &["-pg"]);
    let folder = tempfile::tempdir().unwrap();
    let capable = executable(folder.path(), "capable", fs::read(&program).unwrap());
    let path = CString::new(capable.as_os_str().as_bytes()).unwrap();
    // Version 2 of linux/capability.h, effective: CAP_NET_RAW.
    let value: [u32; 5] = [0x0200_0001, 1 << 13, 0, 0, 0];
    let name = c"security.capability".as_ptr();
    // SAFETY: both strings are NUL-terminated, and the value is 20 bytes long.
    let set = unsafe { libc::setxattr(path.as_ptr(), name, value.as_ptr().cast(), 20, 0) };
    let error = std::io::Error::last_os_error();
    assert_eq!(set, 0, "needs file capabilities: {error}");
    assert!(why_not(&capable, CheckMethod::Mcount).starts_with("has file capabilities"));
}
