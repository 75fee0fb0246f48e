//! Reads files of rules.
//!
//! A statement begins in the first column, and goes on in lines that begin with a space. So an
//! error in one production is found there, and not in the next one.

use std::fmt;

use super::expression::{COUNTERS, Expression, Operand, Relation, overflow, zero};
use super::kinds::{CLASSES, INSTRUCTIONS, Kind, Kinds};
use super::production::{Control, Handler, PRODUCTIONS_MAX, Production, Register, RuleSet, Value};

/// Bytes that a file may have.
pub const FILE_BYTES_MAX: usize = 1 << 16;
const NAME_MAX: usize = 64;
const REGISTERS_MAX: usize = 32;
/// Parentheses and `!` inside each other.
const DEPTH_MAX: usize = 32;
const START: &str = "start";
const CALLS: Kinds = Kinds::of(&[Kind::Call, Kind::IndirectCall]);

/// What is wrong with a file of rules, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleError {
    /// Both from 1 on.
    pub line: usize,
    pub column: usize,
    pub why: String,
    /// The text of the line.
    source: String,
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.why)
    }
}

impl std::error::Error for RuleError {}

impl RuleError {
    /// The line, with a caret below its error.
    pub fn excerpt(&self) -> String {
        let number = self.line.to_string();
        let gap = " ".repeat(number.len());
        // A tab stays one, so that the caret is below its column.
        let before = self.source.chars().take(self.column - 1);
        let before: String = before.map(|c| if c == '\t' { c } else { ' ' }).collect();
        let source: String = self
            .source
            .chars()
            .map(|c| if c.is_control() && c != '\t' { '?' } else { c })
            .collect();
        format!(" {number} | {source}\n {gap} | {before}^ {}\n", self.why)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Token<'a> {
    Word(&'a str),
    Number(i64),
    Sign(&'static str),
    /// The end of a statement.
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => write!(f, "`{word}`"),
            Self::Number(number) => write!(f, "`{number}`"),
            Self::Sign(sign) => write!(f, "`{sign}`"),
            Self::End => f.write_str("the end of the line"),
        }
    }
}

/// Signs; one that begins like another one comes first.
const SIGNS: [&str; 16] =
    ["->", "&&", "||", "==", "!=", "<=", ">=", "<", ">", "!", "(", ")", ",", ":", "=", "-"];

#[derive(Clone, Copy, Debug)]
struct Found<'a> {
    token: Token<'a>,
    /// Offset in the file of its first byte, and of the byte behind it.
    from: usize,
    to: usize,
}

/// Parses a file of rules.
pub fn parse(text: &str) -> Result<RuleSet, RuleError> {
    if text.len() > FILE_BYTES_MAX {
        return Err(error_at(text, 0, format!("the file has more than {FILE_BYTES_MAX} bytes")));
    }
    let mut rules = RuleSet::default();
    for statement in statements(text)? {
        let mut parser = Parser { text, tokens: &statement, at: 0, depth: 0 };
        parser.statement(&mut rules)?;
    }
    if rules.productions.is_empty() {
        let why = "expected a production, as in `P1: T.OPCLASS == proc_call -> null, inc_1`";
        return Err(error_at(text, text.len(), why.to_owned()));
    }
    Ok(rules)
}

/// Parses a pattern with its condition.
pub fn parse_pattern(text: &str) -> Result<Expression, RuleError> {
    let mut tokens = Vec::new();
    let within = text.get(..text.len().min(FILE_BYTES_MAX)).unwrap_or_default();
    for statement in statements(within)? {
        tokens.extend(statement.into_iter().filter(|one| one.token != Token::End));
    }
    tokens.push(Found { token: Token::End, from: within.len(), to: within.len() });
    let mut parser = Parser { text: within, tokens: &tokens, at: 0, depth: 0 };
    let found = parser.any()?;
    match parser.next() {
        Found { token: Token::End, .. } => Ok(found),
        other => Err(parser.unexpected("`&&` or `||`", other)),
    }
}

/// The tokens of each statement, with its end.
fn statements(text: &str) -> Result<Vec<Vec<Found<'_>>>, RuleError> {
    let mut statements: Vec<Vec<Found<'_>>> = Vec::new();
    let mut from = 0;
    for line in text.split_inclusive('\n') {
        let code = line.split('#').next().unwrap_or_default().trim_end();
        let tokens = tokens(text, from, code)?;
        let is_continued = code.starts_with([' ', '\t']);
        match statements.last_mut().filter(|_| is_continued) {
            Some(open) => open.extend(tokens),
            None if !tokens.is_empty() => statements.push(tokens),
            None => {}
        }
        from += line.len();
    }
    for statement in &mut statements {
        let end = statement.last().map_or(0, |last| last.to);
        statement.push(Found { token: Token::End, from: end, to: end });
    }
    Ok(statements)
}

/// The tokens of a line that begins at an offset.
fn tokens<'a>(text: &'a str, from: usize, line: &'a str) -> Result<Vec<Found<'a>>, RuleError> {
    let mut tokens = Vec::new();
    let mut rest = line;
    loop {
        rest = rest.trim_start();
        let Some(first) = rest.chars().next() else { return Ok(tokens) };
        let at = from + (line.len() - rest.len());
        let is_of_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let length = match SIGNS.iter().find(|sign| rest.starts_with(**sign)) {
            Some(sign) => {
                let is_number = *sign == "-" && rest[1..].starts_with(|c: char| c.is_ascii_digit());
                if !is_number {
                    tokens.push(Found { token: Token::Sign(sign), from: at, to: at + sign.len() });
                    rest = &rest[sign.len()..];
                    continue;
                }
                1 + rest[1..].find(|c| !is_of_word(c)).unwrap_or(rest.len() - 1)
            }
            None => rest.find(|c| !is_of_word(c)).unwrap_or(rest.len()),
        };
        if length == 0 {
            return Err(error_at(text, at, format!("unexpected character `{first}`")));
        }
        let (word, after) = rest.split_at(length);
        let token = if word.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            let number = number(word).ok_or_else(|| {
                error_at(text, at, format!("expected a number, as 499 or 0x1f3, found `{word}`"))
            })?;
            Token::Number(number)
        } else {
            Token::Word(word)
        };
        tokens.push(Found { token, from: at, to: at + length });
        rest = after;
    }
}

fn number(word: &str) -> Option<i64> {
    let (digits, is_negative) = match word.strip_prefix('-') {
        Some(digits) => (digits, true),
        None => (word, false),
    };
    let digits = digits.replace('_', "");
    let value = match digits.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if is_negative { -value } else { value })
}

/// An error at an offset in the file.
fn error_at(text: &str, at: usize, why: String) -> RuleError {
    let before = text.get(..at).unwrap_or(text);
    // The end of a file that ends with a line is the end of that line.
    let before = if at == text.len() { before.trim_end_matches('\n') } else { before };
    let line = before.matches('\n').count();
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count();
    let source = text.split('\n').nth(line).unwrap_or_default().trim_end().to_owned();
    RuleError { line: line + 1, column: column + 1, why, source }
}

struct Parser<'a, 'b> {
    text: &'a str,
    tokens: &'b [Found<'a>],
    at: usize,
    depth: usize,
}

impl<'a> Parser<'a, '_> {
    /// The next token; the end of the statement over and over.
    fn peek(&self) -> Found<'a> {
        let end = Found { token: Token::End, from: self.text.len(), to: self.text.len() };
        self.tokens.get(self.at).or(self.tokens.last()).copied().unwrap_or(end)
    }

    fn next(&mut self) -> Found<'a> {
        let found = self.peek();
        self.at += 1;
        found
    }

    /// Goes on behind a sign, if it is next.
    fn accept(&mut self, sign: &str) -> bool {
        let is_next = matches!(self.peek().token, Token::Sign(found) if found == sign);
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, sign: &'static str, expected: &str) -> Result<(), RuleError> {
        if self.accept(sign) { Ok(()) } else { Err(self.unexpected(expected, self.peek())) }
    }

    fn unexpected(&self, expected: &str, found: Found<'_>) -> RuleError {
        self.error(found, format!("expected {expected}, found {}", found.token))
    }

    fn error(&self, at: Found<'_>, why: impl Into<String>) -> RuleError {
        error_at(self.text, at.from, why.into())
    }

    fn statement(&mut self, rules: &mut RuleSet) -> Result<(), RuleError> {
        let first = self.next();
        let Token::Word(name) = first.token else {
            return Err(self.unexpected("the name of a production or a register", first));
        };
        if name.len() > NAME_MAX || name.contains('.') {
            let why = format!("a name has letters, digits and `_`, at most {NAME_MAX}");
            return Err(self.error(first, why));
        }
        if self.accept("=") {
            return self.register(first, name, rules);
        }
        self.expect(":", "`:` behind the name of a production, or `=` behind that of a register")?;
        if name == START {
            if !rules.start.is_empty() {
                return Err(self.error(first, "`start` is there twice"));
            }
            rules.start = self.controls(&rules.registers)?;
            return Ok(());
        }
        if rules.productions.iter().any(|known| known.name == name) {
            return Err(self.error(first, format!("the production `{name}` is there twice")));
        }
        if rules.productions.len() == PRODUCTIONS_MAX {
            let why = format!("there are more than {PRODUCTIONS_MAX} productions");
            return Err(self.error(first, why));
        }
        let production = self.production(name, rules)?;
        rules.productions.push(production);
        Ok(())
    }

    fn register(
        &mut self,
        first: Found<'_>,
        name: &str,
        rules: &mut RuleSet,
    ) -> Result<(), RuleError> {
        if rules.registers.iter().any(|(known, _)| known == name) {
            return Err(self.error(first, format!("the register `{name}` is there twice")));
        }
        if rules.registers.len() == REGISTERS_MAX {
            let why = format!("there are more than {REGISTERS_MAX} registers");
            return Err(self.error(first, why));
        }
        let is_random = self.peek().token == Token::Word("random");
        if is_random {
            self.next();
            self.expect("(", "`(`")?;
        }
        let value = self.small("a number, or random(NUMBER)")?;
        if is_random {
            self.expect(")", "`)`")?;
        }
        self.end("the end of the line")?;
        rules.registers.push((name.to_owned(), Register { value, is_random }));
        Ok(())
    }

    /// A number of 32 bits.
    fn small(&mut self, expected: &str) -> Result<i32, RuleError> {
        let found = self.next();
        let Token::Number(number) = found.token else {
            return Err(self.unexpected(expected, found));
        };
        i32::try_from(number)
            .map_err(|_| self.error(found, format!("{number} does not fit into 32 bits")))
    }

    fn end(&mut self, expected: &str) -> Result<(), RuleError> {
        let found = self.next();
        if found.token == Token::End { Ok(()) } else { Err(self.unexpected(expected, found)) }
    }

    fn production(&mut self, name: &str, rules: &RuleSet) -> Result<Production, RuleError> {
        let begin = self.peek();
        let matches = self.any()?;
        let end = self.tokens.get(self.at.saturating_sub(1)).map_or(begin.to, |last| last.to);
        let lines = self.text.get(begin.from..end).unwrap_or_default().lines();
        // A production of several lines is shown in one, without its comments.
        let lines = lines.map(|line| line.split('#').next().unwrap_or_default().trim());
        let text = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        if Kind::ALL.iter().all(|&kind| matches.may_hold(kind, None) == Some(false)) {
            return Err(self.error(begin, "no instruction can match this pattern"));
        }
        self.expect("->", "`&&`, `||` or `->`")?;
        let replacement = self.next();
        let handler = match replacement.token {
            Token::Word("null") => None,
            Token::Word("call") => Some(self.handler(&matches)?),
            _ => return Err(self.unexpected("call(HANDLER) or null", replacement)),
        };
        self.expect(",", "`,` and a control, as inc_1 or null")?;
        let controls = self.controls(&rules.registers)?;
        Ok(Production { name: name.to_owned(), matches, text, handler, controls })
    }

    fn handler(&mut self, matches: &Expression) -> Result<Handler, RuleError> {
        self.expect("(", "`(` and a handler")?;
        let found = self.next();
        let handler = match found.token {
            Token::Word("CallPair") => Handler::CallPair,
            Token::Word("HotMethod") => Handler::HotMethod,
            Token::Word("DataStream") => Handler::DataStream,
            _ => return Err(self.unexpected("CallPair, HotMethod or DataStream", found)),
        };
        let is_memory = |kind: &&Kind| **kind == Kind::Memory;
        let mut others = Kind::ALL.iter().filter(|kind| !is_memory(kind));
        if handler == Handler::DataStream && others.any(|&kind| matches.kinds().contains(kind)) {
            let why = "DataStream is for memory accesses only: its pattern must require T.OPCLASS \
                       == mem_op";
            return Err(self.error(found, why));
        }
        let others = Kind::ALL.iter().filter(|&&kind| !CALLS.contains(kind));
        if handler == Handler::CallPair
            && others.into_iter().any(|&kind| matches.kinds().contains(kind))
        {
            let why = "CallPair is for calls only: its pattern must require T.OPCLASS == proc_call";
            return Err(self.error(found, why));
        }
        self.expect(")", "`)`")?;
        // The instruction itself is always executed behind the handler.
        if self.peek().token == Token::Word("T.INSN") {
            self.next();
        }
        Ok(handler)
    }

    fn controls(&mut self, registers: &[(String, Register)]) -> Result<Vec<Control>, RuleError> {
        if self.peek().token == Token::Word("null") {
            self.next();
            return self.end("the end of the production").map(|()| Vec::new());
        }
        let mut controls = vec![self.control(registers)?];
        while self.accept(",") {
            controls.push(self.control(registers)?);
        }
        self.end("`,` or the end of the production")?;
        Ok(controls)
    }

    fn control(&mut self, registers: &[(String, Register)]) -> Result<Control, RuleError> {
        const EXPECTED: &str = "inc_N, dec_N, set_N(VALUE) or null";
        let found = self.next();
        let Token::Word(word) = found.token else {
            return Err(self.unexpected(EXPECTED, found));
        };
        let Some((name, counter)) = word.split_once('_') else {
            return Err(self.unexpected(EXPECTED, found));
        };
        Ok(match name {
            "inc" => Control::Inc(self.counter(counter, found)?),
            "dec" => Control::Dec(self.counter(counter, found)?),
            "set" => {
                let counter = self.counter(counter, found)?;
                self.expect("(", "`(` and a value")?;
                let value = self.value(registers)?;
                self.expect(")", "`)`")?;
                Control::Set(counter, value)
            }
            _ => return Err(self.unexpected(EXPECTED, found)),
        })
    }

    fn value(&mut self, registers: &[(String, Register)]) -> Result<Value, RuleError> {
        let found = self.peek();
        let Token::Word(word) = found.token else {
            let number = self.small("a register or a number")?;
            return Ok(Value::Number(number.cast_unsigned()));
        };
        self.next();
        let known = registers.iter().position(|(name, _)| name == word);
        known.map(Value::Register).ok_or_else(|| {
            self.error(
                found,
                format!("no register `{word}`: define it above, by `{word} = NUMBER`"),
            )
        })
    }

    fn counter(&self, text: &str, found: Found<'_>) -> Result<usize, RuleError> {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|&number: &usize| is_number && number < COUNTERS);
        number.ok_or_else(|| {
            self.error(found, format!("counters have the numbers 0 to {}", COUNTERS - 1))
        })
    }

    // Patterns and conditions.

    fn any(&mut self) -> Result<Expression, RuleError> {
        let mut parts = vec![self.all()?];
        while self.accept("||") {
            parts.push(self.all()?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Expression::Any(parts) })
    }

    fn all(&mut self) -> Result<Expression, RuleError> {
        let mut parts = vec![self.single()?];
        while self.accept("&&") {
            parts.push(self.single()?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Expression::All(parts) })
    }

    fn single(&mut self) -> Result<Expression, RuleError> {
        const EXPECTED: &str = "T.OPCLASS, T.INSN, T.PC, T.Target, overflow_N, zero_N, `!` or `(`";
        let found = self.peek();
        if self.depth == DEPTH_MAX {
            let why = format!("there are more than {DEPTH_MAX} `(` or `!` inside each other");
            return Err(self.error(found, why));
        }
        if self.accept("!") {
            self.depth += 1;
            let inside = self.single();
            self.depth -= 1;
            return Ok(Expression::Not(inside?.into()));
        }
        if self.accept("(") {
            self.depth += 1;
            let inside = self.any();
            self.depth -= 1;
            let inside = inside?;
            self.expect(")", "`&&`, `||` or `)`")?;
            return Ok(inside);
        }
        match found.token {
            Token::Word("T.OPCLASS") => self.kinds("a class", &CLASSES),
            Token::Word("T.INSN") => self.kinds("an instruction", &INSTRUCTIONS),
            Token::Word("T.PC" | "T.Target") | Token::Number(_) => self.comparison(),
            Token::Word(word) => {
                self.next();
                match word.split_once('_') {
                    Some(("overflow", counter)) => {
                        Ok(Expression::Flag(overflow(self.counter(counter, found)?)))
                    }
                    Some(("zero", counter)) => {
                        Ok(Expression::Flag(zero(self.counter(counter, found)?)))
                    }
                    _ => Err(self.unexpected(EXPECTED, found)),
                }
            }
            _ => Err(self.unexpected(EXPECTED, found)),
        }
    }

    fn kinds(&mut self, what: &str, names: &[(&str, Kinds)]) -> Result<Expression, RuleError> {
        self.next();
        let is_equal = self.accept("==");
        if !is_equal {
            self.expect("!=", "`==` or `!=`")?;
        }
        let found = self.next();
        let known = names.iter().find(|(name, _)| found.token == Token::Word(name));
        let kinds = known.map(|&(_, kinds)| Expression::Is(kinds)).ok_or_else(|| {
            let all: Vec<&str> = names.iter().map(|&(name, _)| name).collect();
            self.unexpected(&format!("{what} ({})", all.join(", ")), found)
        })?;
        Ok(if is_equal { kinds } else { Expression::Not(kinds.into()) })
    }

    fn comparison(&mut self) -> Result<Expression, RuleError> {
        let left = self.operand()?;
        let found = self.next();
        let relation = match found.token {
            Token::Sign("==") => Relation::Equal,
            Token::Sign("!=") => Relation::Unequal,
            Token::Sign("<") => Relation::Less,
            Token::Sign("<=") => Relation::LessOrEqual,
            Token::Sign(">") => Relation::Greater,
            Token::Sign(">=") => Relation::GreaterOrEqual,
            _ => return Err(self.unexpected("==, !=, <, <=, > or >=", found)),
        };
        Ok(Expression::Compares(left, relation, self.operand()?))
    }

    fn operand(&mut self) -> Result<Operand, RuleError> {
        let found = self.next();
        match found.token {
            Token::Word("T.PC") => Ok(Operand::Pc),
            Token::Word("T.Target") => Ok(Operand::Target),
            Token::Number(number) => u64::try_from(number)
                .map(Operand::Number)
                .map_err(|_| self.error(found, "an address is not negative")),
            _ => Err(self.unexpected("T.PC, T.Target or an address", found)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    const FILE: &str = include_str!("../../../workloads/profile/hps.rules");

    #[test]
    fn the_shipped_file_has_the_productions_of_the_paper() {
        let rules = parse(FILE).unwrap();
        let names: Vec<&str> = rules.productions.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names[..6], ["P1", "P2", "P3", "P4", "P5", "P6"]);
        assert_eq!(names[6..], ["CallPairs", "HotMethods", "DataStreams"]);
        let handlers: Vec<_> = rules.productions.iter().filter_map(|one| one.handler).collect();
        assert_eq!(handlers, [Handler::CallPair, Handler::HotMethod, Handler::DataStream]);
        let p6 = &rules.productions[5];
        assert_eq!(p6.text, "T.OPCLASS == branch && T.PC > T.Target && overflow_1 && overflow_2");
        assert_eq!(
            p6.controls,
            [Control::Set(1, Value::Register(0)), Control::Set(2, Value::Register(1))]
        );
        assert_eq!(rules.start, p6.controls);
        // What a profile has of a production is read again.
        for production in &rules.productions {
            assert_eq!(parse_pattern(&production.text).as_ref(), Ok(&production.matches));
        }
    }

    #[test]
    fn and_binds_more_than_or() {
        let is = |name| Expression::Is(CLASSES.iter().find(|(known, _)| *known == name).unwrap().1);
        let back = Expression::Compares(Operand::Pc, Relation::Greater, Operand::Target);
        assert_eq!(
            parse_pattern("T.OPCLASS == proc_call || T.OPCLASS==branch && T.PC > T.Target"),
            Ok(Expression::Any(vec![
                is("proc_call"),
                Expression::All(vec![is("branch"), back.clone()])
            ]))
        );
        let first = Expression::Any(vec![is("return"), Expression::Flag(overflow(3))]);
        assert_eq!(
            parse_pattern("!(T.OPCLASS == return || overflow_3) && T.PC > T.Target"),
            Ok(Expression::All(vec![Expression::Not(first.into()), back]))
        );
        let numbers = parse_pattern("T.PC >= 0x40_0000 && T.INSN != call").unwrap();
        assert!(numbers.has_numbers() && !numbers.has_flags());
    }

    /// Goal: an error names its line and column, and what was expected there. Method: files with
    /// one error each, whose place is that of the mark `@`.
    #[test]
    fn errors_say_where_and_what_is_expected() {
        let cases = [
            ("@", "expected a production"),
            ("# only\n# comments@\n", "expected a production"),
            ("@17: overflow_1", "expected the name of a production or a register"),
            ("P1 @overflow_1", "expected `:` behind the name"),
            ("P1: T.OPCLASS @= branch -> null, null", "expected `==` or `!=`, found `=`"),
            ("P1: T.OPCLASS == @call -> null, null", "expected a class (branch, indirect_jump, "),
            ("P1: T.INSN ==@", "expected an instruction (cond_branch, "),
            ("P1: T.PC @&& overflow_1 -> null, null", "expected ==, !=, <, <=, > or >=, found"),
            ("P1: T.PC < @overflow_1 -> null, null", "expected T.PC, T.Target or an address"),
            ("P1: T.PC < @-1 -> null, null", "an address is not negative"),
            ("P1: @T.OPC == branch -> null, null", "expected T.OPCLASS, T.INSN"),
            ("P1: @overflow_8 -> null, null", "counters have the numbers 0 to 7"),
            ("P1: zero_1 && @+zero_2 -> null, null", "unexpected character `+`"),
            ("P1: (zero_1 @-> null, null", "expected `&&`, `||` or `)`, found `->`"),
            ("P1: zero_1\n  @null, null", "expected `&&`, `||` or `->`, found `null`"),
            ("P1: zero_1@\nnull, null", "expected `&&`, `||` or `->`, found the end of the line"),
            ("P1: zero_1 -> @nothing, null", "expected call(HANDLER) or null"),
            ("P1: zero_1 -> null@", "expected `,` and a control"),
            ("P1: zero_1 -> null,@", "expected inc_N, dec_N, set_N(VALUE) or null"),
            ("P1: zero_1 -> null, @inc_x", "counters have the numbers"),
            ("P1: zero_1 -> null, inc_1 @inc_2", "expected `,` or the end of the production"),
            ("P1: zero_1 -> null, null@, inc_2", "expected the end of the production"),
            ("P1: zero_1 -> null, set_1(@x)", "no register `x`: define it above"),
            ("P1: zero_1 -> null, set_1(@4294967296)", "4294967296 does not fit into 32 bits"),
            ("P1: zero_1 -> call(@Method), null", "expected CallPair, HotMethod or D"),
            ("P1: zero_1 -> call(@CallPair), null", "CallPair is for calls only"),
            (
                "P1: T.OPCLASS != branch -> call(@DataStream), null",
                "DataStream is for memory accesses only",
            ),
            ("P1: @T.OPCLASS == branch && T.OPCLASS == return -> null, null", "no instruction can"),
            ("a = 1\n@a = 2", "the register `a` is there twice"),
            ("P1: zero_1 -> null, null\n@P1: zero_1 -> null, null", "the production `P1` is there"),
            ("start: inc_1\n@start: inc_1", "`start` is there twice"),
            ("a = @b", "expected a number, or random(NUMBER), found `b`"),
            ("a = random(@)", "expected a number, or random(NUMBER), found `)`"),
            ("a = @0x1g", "expected a number, as 499 or 0x1f3, found `0x1g`"),
            ("@T.PC: zero_1 -> null, null", "a name has letters, digits and `_`"),
        ];
        for (marked, why) in cases {
            let at = marked.find('@').unwrap();
            let text = marked.replace('@', "");
            let error = parse(&text).expect_err(marked);
            assert!(error.why.starts_with(why), "{marked}: {error}");
            let line = marked[..at].matches('\n').count() + 1;
            let column = at - marked[..at].rfind('\n').map_or(0, |newline| newline + 1) + 1;
            assert_eq!((error.line, error.column), (line, column), "{marked}: {error}");
        }
        let error = parse("# one\nP1:\tT.OPCLASS = branch -> null, null").unwrap_err();
        let excerpt = " 2 | P1:\tT.OPCLASS = branch -> null, null\n   |    \t          ^ expected \
                       `==` or `!=`, found `=`\n";
        assert_eq!(error.excerpt(), excerpt);
    }

    #[test]
    fn too_much_is_refused() {
        let production = |number| format!("P{number}: zero_1 -> null, null\n");
        let many = |count| (0..count).map(production).collect::<String>();
        assert_eq!(parse(&many(PRODUCTIONS_MAX)).unwrap().productions.len(), PRODUCTIONS_MAX);
        let error = parse(&many(PRODUCTIONS_MAX + 1)).unwrap_err();
        assert!(error.why.contains("more than 32 productions") && error.line == 33, "{error}");
        for deep in ["!", "("] {
            let text = format!("P: {}zero_1 -> null, null", deep.repeat(20_000));
            assert!(parse(&text).unwrap_err().why.contains("inside each other"));
        }
        assert!(parse(&"#".repeat(FILE_BYTES_MAX + 1)).unwrap_err().why.contains("bytes"));
    }

    /// Goal: a damaged file is refused or read, always in the end and without a panic. Method: the
    /// shipped file, with random pieces removed, repeated or replaced.
    #[test]
    fn damaged_files_are_refused_or_read() {
        const PIECES: [&str; 14] =
            ["(", ")", "!", "&&", "||", "\n", " ", "#", "->", "T.PC", "set_1(", "-", "0x", "ä"];
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let (mut read, mut refused) = (0, 0);
        for _ in 0..4_000 {
            let mut text: Vec<char> = FILE.chars().filter(|c| c.is_ascii()).collect();
            for _ in 0..random.random_range(1..5) {
                let from = random.random_range(0..text.len());
                let to = (from + random.random_range(0..20)).min(text.len());
                match random.random_range(0..3) {
                    0 => drop(text.drain(from..to)),
                    1 => {
                        let again = text[from..to].to_vec();
                        text.splice(from..from, again).for_each(drop);
                    }
                    _ => {
                        let piece = PIECES[random.random_range(0..PIECES.len())];
                        text.splice(from..from, piece.chars()).for_each(drop);
                    }
                }
            }
            let text: String = text.into_iter().collect();
            match parse(&text) {
                Ok(rules) => {
                    assert!(rules.productions.len() <= PRODUCTIONS_MAX);
                    read += 1;
                }
                Err(error) => {
                    let lines = text.lines().count();
                    assert!((1..=lines).contains(&error.line), "{error}");
                    assert_eq!(error.excerpt().lines().count(), 2);
                    refused += 1;
                }
            }
        }
        assert!(read > 200 && refused > 1_000, "{read} {refused}");
        for end in 0..FILE.len() {
            let _either = FILE.get(..end).map(parse);
        }
    }
}
