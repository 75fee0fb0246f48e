//! The file of `elfen profile record --rules`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use elfen_console::failure::{Failure, Status, named};

use crate::rules::{FILE_BYTES_MAX, RuleSet, parse};

/// Reads a file of rules, of which at least one collects something.
pub(super) fn read(path: &Path) -> Result<RuleSet, Failure> {
    let what = || named("the rules", path);
    let unreadable = |why: std::io::Error| {
        let fix = "name a file of rules, as workloads/profile/hps.rules";
        Failure::new(Status::Failed, what(), why, fix)
    };
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    // One byte more than fits, so that the parser refuses a longer file.
    let most = FILE_BYTES_MAX as u64 + 1;
    file.take(most).read_to_end(&mut bytes).map_err(unreadable)?;
    let Ok(text) = String::from_utf8(bytes) else {
        let fix = "name a file of rules, as workloads/profile/hps.rules";
        return Err(Failure::new(Status::Usage, what(), "it is not text in UTF-8", fix));
    };
    let rules = parse(&text).map_err(|error| {
        let fix = "correct it; docs/design/rules.md has the grammar";
        Failure::new(Status::Usage, what(), &error, fix).with_screen(error.excerpt())
    })?;
    if rules.productions.iter().all(|one| one.handler.is_none()) {
        let why = "no production has a handler, so nothing would be collected";
        let fix = "add one, as in `Methods: T.OPCLASS == proc_call -> call(HotMethod), null`";
        return Err(Failure::new(Status::Usage, what(), why, fix));
    }
    Ok(rules)
}
