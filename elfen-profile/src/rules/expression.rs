//! Patterns and conditions: when a production matches.

use std::cmp::Ordering;

use super::kinds::{Kind, Kinds};

/// The counters that productions may use, from number 0 on.
pub(super) const COUNTERS: usize = 8;

/// The flags of all counters, one bit each: those of overflows first.
pub(super) type Flags = u16;

pub(super) fn overflow(counter: usize) -> Flags {
    1 << counter
}

pub(super) fn zero(counter: usize) -> Flags {
    1 << (COUNTERS + counter)
}

/// A side of a comparison.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operand {
    /// The address of the instruction.
    Pc,
    /// The address that the instruction leads to.
    Target,
    Number(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Relation {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Relation {
    fn holds(self, order: Ordering) -> bool {
        match self {
            Self::Equal => order.is_eq(),
            Self::Unequal => order.is_ne(),
            Self::Less => order.is_lt(),
            Self::LessOrEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterOrEqual => order.is_ge(),
        }
    }
}

/// When a production matches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Expression {
    Always(bool),
    /// The instruction is of one of these kinds.
    Is(Kinds),
    Compares(Operand, Relation, Operand),
    /// A flag of a counter is set.
    Flag(Flags),
    Not(Box<Self>),
    All(Vec<Self>),
    Any(Vec<Self>),
}

impl Expression {
    /// What is left of it for a kind of instruction while the flags have these values: only
    /// comparisons.
    pub(super) fn under(&self, kind: Kind, flags: Flags) -> Self {
        match self {
            Self::Is(kinds) => Self::Always(kinds.contains(kind)),
            Self::Flag(flag) => Self::Always(flags & flag != 0),
            Self::Always(_) | Self::Compares(..) => self.clone(),
            Self::Not(one) => match one.under(kind, flags) {
                Self::Always(holds) => Self::Always(!holds),
                other => Self::Not(other.into()),
            },
            Self::All(parts) => joined(parts, kind, flags, true, Self::All),
            Self::Any(parts) => joined(parts, kind, flags, false, Self::Any),
        }
    }

    /// Whether what [`Self::under`] has left holds at these addresses.
    pub(super) fn holds(&self, pc: u64, target: u64) -> bool {
        let value = |operand: Operand| match operand {
            Operand::Pc => pc,
            Operand::Target => target,
            Operand::Number(number) => number,
        };
        match self {
            Self::Always(holds) => *holds,
            Self::Compares(a, relation, b) => relation.holds(value(*a).cmp(&value(*b))),
            Self::Not(one) => !one.holds(pc, target),
            Self::All(parts) => parts.iter().all(|part| part.holds(pc, target)),
            Self::Any(parts) => parts.iter().any(|part| part.holds(pc, target)),
            Self::Is(_) | Self::Flag(_) => false,
        }
    }

    /// Whether it holds for a kind of instruction whose address and target are in this order, if
    /// that is known. `None` if it depends on flags, or on addresses that are not known.
    pub fn may_hold(&self, kind: Kind, order: Option<Ordering>) -> Option<bool> {
        match self {
            Self::Always(holds) => Some(*holds),
            Self::Is(kinds) => Some(kinds.contains(kind)),
            Self::Flag(_) => None,
            Self::Compares(a, relation, b) => Some(relation.holds(match (a, b) {
                (Operand::Pc, Operand::Target) => order?,
                (Operand::Target, Operand::Pc) => order?.reverse(),
                (Operand::Number(a), Operand::Number(b)) => a.cmp(b),
                (a, b) if a == b => Ordering::Equal,
                _ => return None,
            })),
            Self::Not(one) => one.may_hold(kind, order).map(|holds| !holds),
            Self::All(parts) => {
                let parts = parts.iter().map(|part| part.may_hold(kind, order));
                parts.reduce(|a, b| match (a, b) {
                    (Some(false), _) | (_, Some(false)) => Some(false),
                    (Some(true), Some(true)) => Some(true),
                    _ => None,
                })?
            }
            Self::Any(parts) => {
                let parts = parts.iter().map(|part| part.may_hold(kind, order));
                parts.reduce(|a, b| match (a, b) {
                    (Some(true), _) | (_, Some(true)) => Some(true),
                    (Some(false), Some(false)) => Some(false),
                    _ => None,
                })?
            }
        }
    }

    /// The kinds of instructions that it may hold for.
    pub fn kinds(&self) -> Kinds {
        let kinds = Kind::ALL.into_iter().filter(|&kind| self.may_hold(kind, None) != Some(false));
        kinds.fold(Kinds::default(), |all, kind| all.with(Kinds::of(&[kind])))
    }

    /// The flags that it asks for.
    pub(super) fn flags(&self) -> Flags {
        match self {
            Self::Flag(flag) => *flag,
            Self::Not(one) => one.flags(),
            Self::All(parts) | Self::Any(parts) => {
                parts.iter().fold(0, |all, part| all | part.flags())
            }
            _ => 0,
        }
    }

    pub fn has_flags(&self) -> bool {
        self.flags() != 0
    }

    /// Whether it compares with fixed addresses.
    pub fn has_numbers(&self) -> bool {
        self.any(&|part| {
            matches!(part, Self::Compares(a, _, b)
                if [a, b].iter().any(|one| matches!(one, Operand::Number(_))))
        })
    }

    fn any(&self, is: &dyn Fn(&Self) -> bool) -> bool {
        let inside = match self {
            Self::Not(one) => one.any(is),
            Self::All(parts) | Self::Any(parts) => parts.iter().any(|part| part.any(is)),
            _ => false,
        };
        inside || is(self)
    }
}

/// Parts of which all must hold, if `neutral` is true, or else one of them.
fn joined(
    parts: &[Expression],
    kind: Kind,
    flags: Flags,
    neutral: bool,
    join: fn(Vec<Expression>) -> Expression,
) -> Expression {
    let mut left = Vec::new();
    for part in parts {
        match part.under(kind, flags) {
            Expression::Always(holds) if holds == neutral => {}
            Expression::Always(holds) => return Expression::Always(holds),
            other => left.push(other),
        }
    }
    match left.len() {
        0 => Expression::Always(neutral),
        1 => left.swap_remove(0),
        _ => join(left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAG: Expression = Expression::Flag(1);

    fn all() -> Vec<Expression> {
        let call = Expression::Is(Kinds::of(&[Kind::Call]));
        let back = Expression::Compares(Operand::Target, Relation::LessOrEqual, Operand::Pc);
        let not = |one: Expression| Expression::Not(one.into());
        vec![
            Expression::All(vec![call.clone(), FLAG]),
            Expression::Any(vec![call.clone(), Expression::All(vec![back.clone(), not(FLAG)])]),
            not(Expression::Any(vec![not(back.clone()), FLAG])),
            not(Expression::All(vec![call, back.clone(), FLAG])),
            Expression::Any(vec![back.clone(), not(back)]),
        ]
    }

    /// Evaluates all of it at once.
    fn plainly(one: &Expression, kind: Kind, flags: Flags, pc: u64, target: u64) -> bool {
        match one {
            Expression::Always(holds) => *holds,
            Expression::Is(kinds) => kinds.contains(kind),
            Expression::Flag(flag) => flags & flag != 0,
            Expression::Compares(..) => one.holds(pc, target),
            Expression::Not(one) => !plainly(one, kind, flags, pc, target),
            Expression::All(all) => all.iter().all(|one| plainly(one, kind, flags, pc, target)),
            Expression::Any(any) => any.iter().any(|one| plainly(one, kind, flags, pc, target)),
        }
    }

    /// Goal: what is left under some flags, and what may hold, agree with the whole expression.
    /// Method: all kinds, flags and orders of addresses.
    #[test]
    fn parts_agree_with_the_whole() {
        for one in all() {
            for kind in Kind::ALL {
                for (target, order) in
                    [(9, Ordering::Less), (5, Ordering::Equal), (1, Ordering::Greater)]
                {
                    let [clear, set] = [0, 1].map(|flags| {
                        let whole = plainly(&one, kind, flags, 5, target);
                        assert_eq!(one.under(kind, flags).holds(5, target), whole, "{one:?}");
                        whole
                    });
                    if let Some(holds) = one.may_hold(kind, Some(order)) {
                        assert_eq!((holds, holds), (clear, set), "{one:?} {kind:?} {order:?}");
                    }
                    if clear || set {
                        assert!(one.kinds().contains(kind), "{one:?} {kind:?}");
                    }
                }
            }
        }
        assert!(!all()[0].kinds().contains(Kind::Jump));
        assert_eq!(all()[0].may_hold(Kind::Call, None), None);
    }
}
